"""Turns that continue others, whole or from their middle: what the engine is asked for and what is recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.engine.base import SampleRequest
from headrace.engine.pool import EnginePool
from headrace.records import Batch, Episode, Group, Task, Turn
from headrace.rollout.base import EpisodeRequest
from headrace.rollout.config import EnvironmentConfig
from headrace.rollout.worker import EpisodeEnd, WorkerRollouts, _WorkerPolicy
from headrace.simulator.loop import run_virtual
from headrace.testing.fakes import fake_pair
from headrace.training.packing import training_sequences

TASK = Task(id="t", prompt="")


class Numbers:
    """A tokenizer for which text is numbers."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class InProcess:
    """A pool that runs the environment here."""

    def __init__(self, environment: Any):
        self._environment = environment

    async def run(self, body: Any, respond: Any, again: Any) -> EpisodeEnd:
        await self._environment(_WorkerPolicy(EnvironmentConfig(), Numbers(), respond))
        return EpisodeEnd(metrics={})


class Recording(EnginePool):
    def __init__(self) -> None:
        engine = fake_pair()[0]
        engine.version = 0
        super().__init__([engine])
        self.asked: list[SampleRequest] = []
        self.released: list[int] = []

    async def sample(self, request: SampleRequest) -> Turn:
        self.asked.append(request)
        return await super().sample(request)

    def release(self, request_id: int) -> None:
        self.released.append(request_id)
        super().release(request_id)


def run(environment: Any) -> tuple[Episode, Recording]:
    async def main() -> tuple[Episode, Recording]:
        engine = Recording()
        rollouts = WorkerRollouts(InProcess(environment), EnvironmentConfig())  # type: ignore[arg-type]
        return await rollouts.run(EpisodeRequest(id="e", task=TASK, seed=1, engine=engine)), engine  # type: ignore[arg-type]

    return run_virtual(main())


def whole(episode: Episode, index: int) -> list[int]:
    return [*episode.full_context(index).tolist(), *episode.turns[index].tokens.tolist()]


@pytest.mark.parametrize("hold", [False, True])
def test_a_completion_is_forked_in_its_middle_and_the_forks_are_forked_again(hold):
    async def environment(policy: Any) -> None:
        first = await policy.sample([5, 6, 7], max_tokens=8, hold=hold)
        second = await policy.sample("9", after=first, max_tokens=6, hold=hold)
        for at in (0, 2, 6):
            fork = await policy.sample("", after=second, at=at, max_tokens=4, hold=hold)
            await policy.sample([4, 4], after=fork, at=1, max_tokens=3)

    episode, engine = run(environment)
    assert episode.failure is None
    start = [5, 6, 7, *[0] * 8, 9]
    assert whole(episode, 1) == start + [0] * 6
    for i, at in enumerate((0, 2, 6)):
        fork, again = episode.turns[2 + 2 * i], episode.turns[3 + 2 * i]
        assert whole(episode, 2 + 2 * i) == start + [0] * at + [0] * 4
        assert whole(episode, 3 + 2 * i) == start + [0] * at + [0, 4, 4] + [0] * 3
        assert again.joins == (2 + 2 * i,)
        # All of the second is continued by the last of the three.
        assert (fork.parent, fork.joins) == ((1, ()) if at == 6 else (0, (1,)))
        assert engine.asked[2 + 2 * i].fork_of == (engine.asked[1].id if hold else None)
        if hold:
            assert engine.asked[2 + 2 * i].fork_at == len(start) + at
            assert engine.asked[2 + 2 * i].context.tolist() == []
    held = [one.id for one in engine.asked if one.hold]
    assert sorted(engine.released) == sorted(held)
    assert len(held) == (5 if hold else 0)


def test_tokens_that_forks_share_are_trained_once():
    async def environment(policy: Any) -> None:
        first = await policy.sample([5, 6, 7], max_tokens=10)
        for at in (3, 3, 6):
            await policy.sample("", after=first, at=at, max_tokens=4)

    episode, _ = run(environment)
    group = Group(id="g", sequence=0, task=TASK, episodes=(episode,))
    batch = Batch(step=1, version=0, groups=(group,), advantages=np.ones(1, np.float32))
    sequences = training_sequences(batch)
    assert sum(sequence.num_trained for sequence in sequences) == 10 + 3 * 4 == episode.num_tokens
    assert sorted(sequence.length for sequence in sequences) == sorted([12, 3 + 3 + 3, 3 + 3 + 3, 3 + 6 + 3])


@pytest.mark.parametrize(("after", "at"), [(False, 2), (True, -1), (True, 9)])
def test_a_fork_at_a_place_that_does_not_exist_fails_the_episode(after, at):
    async def environment(policy: Any) -> None:
        first = await policy.sample([5], max_tokens=8, hold=True)
        await policy.sample([5], after=first if after else None, at=at)

    episode, engine = run(environment)
    assert episode.failure == "bad_request"
    assert engine.released == [engine.asked[0].id]
