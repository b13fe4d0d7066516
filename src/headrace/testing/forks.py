"""The engine's contract: requests that continue another's sequence from its middle."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.errors import EpisodeFailure
from headrace.records import Sampling, Turn
from headrace.testing.serving import EngineTests, Serving, plain, publish, request, running, scenario, score


class ForkTests(EngineTests):
    @scenario
    async def test_forks_of_a_running_request_begin_with_its_tokens(self, serving: Serving) -> None:
        self.needs("fork")
        engine = serving.engine
        number = await publish(serving)
        source = request([1, 2, 3], serving.long_tokens)
        task = asyncio.create_task(engine.sample(source))
        await running(engine, 1)
        asked = [
            request([], 15, fork_of=source.id, fork_at=1),
            request([], 15, fork_of=source.id, fork_at=5, seed=1),
            request([4, 5], 15, fork_of=source.id, fork_at=6, seed=2, sampling=Sampling(temperature=0.7)),
        ]
        forks = await asyncio.gather(*(engine.sample(one) for one in asked))
        assert not task.done()
        turn = await task
        assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)
        sequence = [1, 2, 3, *turn.tokens.tolist()]
        for one, fork in zip(asked, forks, strict=True):
            assert fork.context.tolist() == [*sequence[: one.fork_at], *one.context.tolist()]
            assert set(fork.versions.tolist()) == {number}
            assert plain(fork.lineage) == [(0, number, "kept", "start")]
            assert len(fork.tokens) == 15 or fork.stop == "end"
            await self._scored(serving, fork)

    @scenario
    async def test_forks_of_a_held_request_begin_with_its_tokens_until_it_is_released(
        self, serving: Serving
    ) -> None:
        self.needs("fork")
        engine = serving.engine
        number = await publish(serving)
        source = request([1, 2, 3], 20, hold=True)
        turn = await engine.sample(source)
        sequence = [1, 2, 3, *turn.tokens.tolist()]
        places = [2, len(sequence) // 2, len(sequence) - 1, len(sequence)]
        asked = [request([], 10, fork_of=source.id, fork_at=at, seed=at, hold=True) for at in places]
        for one, fork in zip(asked, await asyncio.gather(*(engine.sample(one) for one in asked)), strict=True):
            assert fork.context.tolist() == sequence[: one.fork_at]
            assert plain(fork.lineage) == [(0, number, "kept", "start")]
            await self._scored(serving, fork)
            again = request([6], 5, fork_of=one.id, fork_at=one.fork_at + 1)
            child = await engine.sample(again)
            assert child.context.tolist() == [*sequence[: one.fork_at], int(fork.tokens[0]), 6]
            await self._scored(serving, child)
        for one in (source, *asked):
            engine.release(one.id)
        await _refused(serving, fork_of=source.id, fork_at=2)

    @scenario
    async def test_forks_go_on_from_a_source_that_older_weights_have_sampled(self, serving: Serving) -> None:
        self.needs("fork", "keep")
        engine = serving.engine
        await publish(serving)
        source = request([1, 2, 3], 12, hold=True)
        turn = await engine.sample(source)
        new = await publish(serving, "keep")
        fork = await engine.sample(request([5], 10, fork_of=source.id, fork_at=8))
        engine.release(source.id)
        assert fork.context.tolist() == [1, 2, 3, *turn.tokens[:5].tolist(), 5]
        assert set(fork.versions.tolist()) == {new}
        first, *later = plain(fork.lineage)
        assert first[0] == 0
        # What older weights computed of it was kept up to the fork, or all of it was computed anew.
        assert [event[1:] for event in later] in ([], [(new, "kept", "fork")])
        assert [first, *later][-1][1] == new

    @scenario
    async def test_a_fork_without_a_source_fails_alone(self, serving: Serving) -> None:
        self.needs("fork")
        engine = serving.engine
        source = request([1, 2], serving.long_tokens)
        task = asyncio.create_task(engine.sample(source))
        await running(engine, 1)
        await _refused(serving, fork_of=10**9, fork_at=1)
        for at in (0, -1, 2 + serving.long_tokens):
            await _refused(serving, fork_of=source.id, fork_at=at)
        turn = await task
        assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)

    async def _scored(self, serving: Serving, turn: Turn) -> None:
        """One pass over the whole sequence gives the log-probs that were recorded."""
        if "score" in self.supports:
            np.testing.assert_allclose((await score(serving, turn)).logprobs, turn.logprobs, atol=1e-4)


async def _refused(serving: Serving, *, fork_of: int, fork_at: int) -> None:
    with pytest.raises(EpisodeFailure) as caught:
        await serving.engine.sample(request([], 3, fork_of=fork_of, fork_at=fork_at))
    assert caught.value.reason == "bad_request"
