"""Sampling parameters of one call: what the engine is asked for, what is recorded, what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from test_forked_turns import InProcess, Recording

from headrace.audit.turns import TurnRules
from headrace.config.run import ModelConfig, RunConfig
from headrace.records import Batch, Episode, Group, KvEvent, Sampling, Support, Task, Turn, decode, encode
from headrace.rollout.base import EpisodeRequest
from headrace.rollout.config import EnvironmentConfig, PythonTasks, SamplingConfig
from headrace.rollout.worker import WorkerRollouts
from headrace.simulator.loop import run_virtual
from headrace.telemetry.episodes import _read_turn, _turn
from headrace.testing.fakes import ScriptedPolicy
from headrace.training.packing import pack, training_sequences

TASK = Task(id="t", prompt="")
OWN = SamplingConfig(temperature=0.9, top_p=0.8)


def run(environment: Any, sampling: Sampling | None = None) -> tuple[Episode, Recording]:
    async def main() -> tuple[Episode, Recording]:
        engine = Recording()
        rollouts = WorkerRollouts(InProcess(environment), EnvironmentConfig(sampling=OWN))  # type: ignore[arg-type]
        request = EpisodeRequest(id="e", task=TASK, seed=1, engine=engine, sampling=sampling)  # type: ignore[arg-type]
        return await rollouts.run(request), engine

    return run_virtual(main())


def values(sampling: Sampling) -> tuple[float, int, float, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


async def three_ways(policy: Any) -> None:
    first = await policy.sample([5, 6], max_tokens=4)
    second = await policy.sample("7", after=first, max_tokens=4, temperature=0.5, top_k=np.int64(5))
    await policy.sample("8", after=second, max_tokens=4, top_p=1, min_p=0.1)


def test_a_call_s_parameters_take_the_place_of_the_environment_s_and_are_recorded_as_its_own() -> None:
    episode, engine = run(three_ways)
    assert episode.failure is None
    expected = [(0.9, 0, 0.8, 0.0), (0.5, 5, 0.8, 0.0), (0.9, 0, 1.0, 0.1)]
    assert [values(request.sampling) for request in engine.asked] == expected
    assert [values(turn.sampling) for turn in episode.turns] == expected
    assert [turn.asked for turn in episode.turns] == [(), ("temperature", "top_k"), ("top_p", "min_p")]
    assert isinstance(episode.turns[1].sampling.top_k, int)


def test_an_evaluation_s_parameters_are_replaced_likewise() -> None:
    _, engine = run(three_ways, Sampling(temperature=0.0))
    assert [values(request.sampling)[0] for request in engine.asked] == [0.0, 0.5, 0.0]


def test_what_was_asked_for_survives_the_wire_and_the_files() -> None:
    episode, _ = run(three_ways)
    again = decode(encode(episode))
    assert [turn.asked for turn in again.turns] == [turn.asked for turn in episode.turns]
    lines = [_turn(turn) for turn in episode.turns]
    assert "asked" not in lines[0]
    assert [_read_turn(line | {"support": None}).asked for line in lines] == [turn.asked for turn in episode.turns]


@pytest.mark.parametrize(
    ("asked", "detail"),
    [
        (
            {"temperature": 0},
            "policy.sample: a temperature is above 0, as a turn that is trained on is sampled (got 0)",
        ),
        ({"top_k": 1}, "policy.sample: top_k is 0 or at least 2, as a turn that is trained on is sampled (got 1)"),
        ({"min_p": 1.0}, "policy.sample: min_p is below 1, as a turn that is trained on is sampled (got 1)"),
        ({"temperature": -1.0}, "policy.sample: a temperature is 0 or lies in [1e-06, 1e+06] (got -1.0)"),
        ({"top_p": 0}, "policy.sample: top_p lies in [1e-06, 1] (got 0.0)"),
        ({"top_p": float("nan")}, "policy.sample: top_p is a number (got nan)"),
        ({"top_k": 2.5}, "policy.sample: top_k is a whole number (got 2.5)"),
        ({"top_k": -1}, "policy.sample: top_k lies in [0, 2147483647] (got -1)"),
        ({"temperature": "hot"}, "policy.sample: temperature is a number (got 'hot')"),
        ({"temperature": True}, "policy.sample: temperature is a number (got True)"),
    ],
    ids=str,
)
def test_what_cannot_be_served_or_trained_on_is_refused_before_anything_is_sampled(
    asked: dict[str, Any], detail: str
) -> None:
    async def environment(policy: Any) -> None:
        await policy.sample([5], **asked)

    episode, engine = run(environment)
    assert (episode.failure, episode.detail) == ("bad_request", detail)
    assert engine.asked == []


def test_each_turn_is_trained_at_its_own_temperature_and_support() -> None:
    def turn(tokens: list[int], sampling: Sampling, support: Support | None, parent: int | None) -> Turn:
        count = len(tokens)
        return Turn(
            context=np.array([1], np.int32),
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            versions=np.zeros(count, np.int32),
            stop="end",
            sampling=sampling,
            support=support,
            parent=parent,
        )

    rows = Support.from_rows([np.array([4, 5], np.int32)])
    turns = (turn([2, 3], Sampling(temperature=0.5), None, None), turn([4], Sampling(top_k=2), rows, 0))
    group = Group(id="g", sequence=0, task=TASK, episodes=(Episode(id="e", task=TASK, turns=turns),))
    batch = Batch(step=1, version=0, groups=(group,), advantages=np.ones(1, np.float32))
    packed = pack(training_sequences(batch))
    assert packed.temperatures_n.tolist() == [0.5, 0.5, 1.0]
    assert packed.support is not None
    ids, offsets = packed.support
    assert (ids.tolist(), offsets.tolist()) == ([4, 5], [0, 0, 0, 2])


def rules(source: str) -> TurnRules:
    environment = EnvironmentConfig(source=source, sampling=SamplingConfig(temperature=0.9))
    config = RunConfig(model=ModelConfig(path=""), tasks=PythonTasks(source="a:b"), environment=environment)
    return TurnRules(config, {0})


def problems(source: str, asked: tuple[Any, ...], **sampling: Any) -> list[str]:
    turn = Turn(
        context=np.array([1], np.int32),
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        stop="end",
        sampling=Sampling(**{"temperature": 0.9, **sampling}),
        lineage=(KvEvent(position=0, version=0, before="recomputed", cause="start"),),
        asked=asked,
    )
    return [what for _, what in rules(source)._sampled_with(turn)]


@pytest.mark.parametrize(
    ("source", "asked", "sampling", "said"),
    [
        ("user.py:Own", (), {}, None),
        ("user.py:Own", ("temperature",), {"temperature": 0.5}, None),
        ("user.py:Own", (), {"temperature": 0.5}, "the run samples with"),
        ("user.py:Own", ("top_p",), {"temperature": 0.5}, "the run samples with"),
        ("user.py:Own", ("temperature",), {"temperature": 0.0}, "a temperature is above 0"),
        ("user.py:Own", ("temperature",), {"temperature": -3.0}, "a temperature is 0 or lies in"),
        ("user.py:Own", ("temperature",), {"temperature": "0.5"}, "no number"),
        ("user.py:Own", ("colour",), {}, "sampling has"),
        ("user.py:Own", (["temperature"],), {}, "sampling has"),
        (EnvironmentConfig().source, ("temperature",), {"temperature": 0.5}, "asks for nothing"),
    ],
)
def test_an_audit_takes_what_a_call_asked_for_and_nothing_else(
    source: str, asked: tuple[Any, ...], sampling: dict[str, Any], said: str | None
) -> None:
    found = problems(source, asked, **sampling)
    assert found == [] if said is None else len(found) == 1 and said in found[0]


def test_the_scripted_policy_of_tests_keeps_what_it_was_asked_for() -> None:
    policy = ScriptedPolicy("a", "b")

    async def main() -> None:
        await policy.sample("p", temperature=0.5)
        await policy.sample("p")

    asyncio.run(main())
    assert policy.sampling == [{"temperature": 0.5}, {}]
