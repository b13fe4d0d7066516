"""An engine whose memory runs out in a step goes on with a smaller cache, and its records say what happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_builders import (
    TOLERANCE,
    all_free,
    drive,
    finish,
    make_engine,
    publish,
    request,
    requests,
    with_samplings,
    worst_replay,
)
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.engine.base import ScoreRequest
from headrace.errors import HeadraceError

TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Failing(TorchDispatchMode):
    """Lets the operations with these numbers, or all of one name, run out of memory."""

    def __init__(self, *numbers: int, always: str = ""):
        super().__init__()
        self.numbers, self.count, self.always = set(numbers), 0, always

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.numbers or (self.always and self.always in str(function)):
            raise torch.OutOfMemoryError(TOLD)
        return function(*args, **(kwargs or {}))


def heard(engine: Any) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    engine.on_event = lambda kind, fields: found.append((kind, fields))
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_turns_are_those_of_an_undisturbed_engine_and_every_log_prob_replays(seed: int, numerics: str) -> None:
    wanted = with_samplings(requests(24, seed=seed))
    config = {"cache_tokens": 1200, "prefill_tokens": 64, "numerics": numerics}
    undisturbed = drive(make_engine(config=config), wanted)
    engine = make_engine(config=config)
    events, pages = heard(engine), engine.pages_total
    with Failing(150 + 371 * seed, 2500 + 997 * seed, 6000 + 1013 * seed):
        turns = drive(engine, wanted)
    assert [kind for kind, _ in events] == ["out_of_memory"] * 3
    assert engine.pages_total == int(int(int(pages * 0.75) * 0.75) * 0.75)
    assert events[-1][1]["cache_tokens"] == 4 * engine.pages_total
    for number, turn in turns.items():
        assert turn.tokens.tolist() == undisturbed[number].tokens.tolist()
        assert abs(turn.logprobs - undisturbed[number].logprobs).max() < TOLERANCE
    assert any(event.cause == "preempt" for turn in turns.values() for event in turn.lineage)
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_log_probs_replay_where_weights_change_too(kv: Any) -> None:
    engine = make_engine(config={"cache_tokens": 900, "prefill_tokens": 64})
    events, version = heard(engine), 0

    def swap_now_and_then(step: int) -> None:
        nonlocal version
        if step % 9 == 8:
            version += 1
            with torch.utils._python_dispatch._disable_current_modes():
                publish(engine, version, kv)

    with Failing(*range(1000, 60_000, 9001)):
        turns = drive(engine, with_samplings(requests(48, seed=9)), swap_now_and_then)
    assert len(events) > 3
    assert version > 3
    assert sum(len(set(turn.versions.tolist())) > 1 for turn in turns.values()) > 10
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_scores_and_forks_go_on() -> None:
    def run(*failures: int) -> dict[int, Any]:
        engine = make_engine(config={"cache_tokens": 800, "prefill_tokens": 16})
        for i in range(4):
            engine.add(request(i, range(9 + i), 30, hold=True))
        engine.score(ScoreRequest(id=10, context=range_of(20), tokens=range_of(25)))
        with Failing(*failures):
            turns = finish(engine)
            engine.add(request(20, (), 20, fork_of=2, fork_at=25))
            return turns | finish(engine)

    undisturbed, disturbed = run(), run(200, 900, 2000)
    assert undisturbed.keys() == disturbed.keys() == {0, 1, 2, 3, 10, 20}
    for number, turn in disturbed.items():
        assert turn.tokens.tolist() == undisturbed[number].tokens.tolist()
        assert abs(turn.logprobs - undisturbed[number].logprobs).max() < TOLERANCE


def range_of(count: int) -> Any:
    return torch.arange(count).numpy() % 32


def test_a_step_of_one_sequence_that_does_not_fit_is_an_error_with_numbers_and_a_remedy() -> None:
    engine = make_engine(config={"cache_tokens": 400, "prefill_tokens": 200})
    events = heard(engine)
    engine.add(request(0, range(20), 30))
    with pytest.raises(HeadraceError) as told, Failing(always="silu"):
        finish(engine)
    assert "24 pages of 4 tokens" in told.value.rule
    assert "engine.max_context" in (told.value.remedy or "")
    assert TOLD in str(told.value)
    assert [fields["cache_tokens"] for _, fields in events] == [300, 224, 168, 124, 96, 96, 96, 96]
    assert events[-1][1]["prefill_tokens"] == 64


def test_what_is_no_lack_of_memory_still_ends_the_engine() -> None:
    engine = make_engine()
    engine.add(request(0))

    def broken(plan: Any) -> Any:
        raise RuntimeError("a kernel is wrong")

    engine._runner.begin = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        engine.step()
    with pytest.raises(HeadraceError, match="runs to its end"):
        engine.step()
