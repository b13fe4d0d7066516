"""The engine's contract: what a swap, or sleep, does to the requests that run."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.engine.base import Interrupt
from headrace.errors import HeadraceError
from headrace.records import Turn
from headrace.testing.loops import until
from headrace.testing.serving import (
    EngineTests,
    Serving,
    has,
    plain,
    publish,
    refused,
    request,
    running,
    scenario,
    serves,
    start,
    verified,
)


class InterruptTests(EngineTests):
    # ── Interrupts ───────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("interrupt", ["keep", "recompute"])
    @scenario
    async def test_sequences_that_run_through_a_swap_carry_both_versions(
        self, serving: Serving, interrupt: Interrupt
    ) -> None:
        self.needs(interrupt)
        old = await publish(serving)
        tasks = [start(serving, [1, 2, i]) for i in range(4)]
        await running(serving.engine, 4)
        new = await publish(serving, interrupt)
        for turn in await asyncio.gather(*tasks):
            _went_on(serving, turn, old, new, "recomputed" if interrupt == "recompute" else "kept")

    @scenario
    async def test_a_swap_that_interrupts_gives_back_what_there_is_and_it_can_be_resumed(
        self, serving: Serving
    ) -> None:
        self.needs("resume")
        engine = serving.engine
        old = await publish(serving)
        asked = [request([1, 2, i], serving.long_tokens, seed=i) for i in range(4)]
        tasks = [asyncio.create_task(engine.sample(one)) for one in asked]
        await running(engine, 4)
        new = await publish(serving, "resume")
        turns = await asyncio.gather(*tasks)
        await until(lambda: has(engine, running=0))
        for one, turn in zip(asked, turns, strict=True):
            assert turn.stop == "cancelled"
            assert 1 <= len(turn.tokens) < serving.long_tokens
            assert set(turn.versions.tolist()) == {old}
            assert plain(turn.lineage) == [(0, old, "kept", "start")]
            rest = request([1, 2, one.seed], serving.long_tokens, seed=one.seed, begun=turn)
            whole, count = await engine.sample(rest), len(turn.tokens)
            assert (whole.stop, len(whole.tokens)) == ("length", serving.long_tokens)
            assert whole.context.tolist() == turn.context.tolist()
            assert whole.tokens[:count].tolist() == turn.tokens.tolist()
            assert whole.logprobs[:count].tolist() == turn.logprobs.tolist()
            assert whole.versions.tolist() == [old] * count + [new] * (serving.long_tokens - count)
            resumed = (len(turn.context) + count - 1, new, "recomputed", "resume")
            assert plain(whole.lineage) == [*plain(turn.lineage), resumed]

    @scenario
    async def test_a_swap_can_make_requests_begin_again(self, serving: Serving) -> None:
        self.needs("retry")
        await publish(serving)
        tasks = [start(serving, [1, 2, i]) for i in range(4)]
        await running(serving.engine, 4)
        new = await publish(serving, "retry")
        for turn in await asyncio.gather(*tasks):
            assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)
            assert set(turn.versions.tolist()) == {new}
            assert plain(turn.lineage) == [(0, new, "kept", "start")]

    @scenario
    async def test_a_swap_that_drains_waits_for_what_runs_and_what_comes_waits_for_it(
        self, serving: Serving
    ) -> None:
        self.needs("drain")
        engine = serving.engine
        old = await publish(serving)
        tasks = [start(serving, [1, 2, i]) for i in range(4)]
        await running(engine, 4)
        new = await verified(serving)
        swap = asyncio.create_task(engine.swap(new, "drain"))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(engine.sample(request([1, 2], 3)))
        await refused("swap", engine.swap(new, "keep"))
        for turn in await asyncio.gather(*tasks):
            assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)
            assert set(turn.versions.tolist()) == {old}
        report = await swap
        assert (report.version, report.running, engine.version) == (new, 0, new)
        assert (await late).versions.tolist() == [new] * 3

    @scenario
    async def test_a_swap_that_waits_is_taken_back_when_its_caller_stops_waiting(self, serving: Serving) -> None:
        self.needs("drain")
        engine = serving.engine
        old = await publish(serving)
        begun = start(serving, [1, 2])
        await running(engine, 1)
        new = await verified(serving)
        swap = asyncio.create_task(engine.swap(new, "drain"))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(engine.sample(request([1], 2)))
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        assert (await waiting).versions.tolist() == [old] * 2
        assert not begun.done()
        assert set((await begun).versions.tolist()) == {old}
        await serves(engine, old)
        await engine.swap(new, "drain")
        await serves(engine, new)

    @scenario
    async def test_a_request_has_its_own_word_on_interrupts(self, serving: Serving) -> None:
        self.needs("keep", "recompute", "resume", "retry", "drain")
        engine = serving.engine
        old = await publish(serving)
        words: tuple[Interrupt | None, ...] = (None, "keep", "recompute", "resume", "retry")
        tasks = [start(serving, [1, 2, i], interrupt=word) for i, word in enumerate(words)]
        await running(engine, len(words))
        new = await publish(serving, "recompute")
        plainly, kept, recomputed, cut, again = await asyncio.gather(*tasks)
        for turn in (plainly, recomputed):
            _went_on(serving, turn, old, new, "recomputed")
        _went_on(serving, kept, old, new, "kept")
        assert cut.stop == "cancelled"
        assert set(cut.versions.tolist()) == {old}
        assert set(again.versions.tolist()) == {new}

        short = asyncio.create_task(engine.sample(request([1], serving.long_tokens // 2, interrupt="drain")))
        long = start(serving, [1, 2])
        await running(engine, 2)
        newer = await publish(serving, "keep")
        assert short.done()
        assert set((await short).versions.tolist()) == {new}
        _went_on(serving, await long, new, newer, "kept")

    @scenario
    async def test_a_turn_that_was_cut_goes_on_as_if_nothing_had_happened(self, serving: Serving) -> None:
        engine = serving.engine
        number = await publish(serving)
        whole = await engine.sample(request([1, 2, 3], serving.long_tokens, seed=3))
        asked = request([1, 2, 3], serving.long_tokens, seed=3)
        task = asyncio.create_task(engine.sample(asked))
        await running(engine, 1)
        engine.cut(asked.id)
        cut = await task
        assert 1 <= len(cut.tokens) < serving.long_tokens
        again = await engine.sample(request([1, 2, 3], serving.long_tokens, seed=3, begun=cut))
        assert again.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=1e-4)
        resumed = (len(cut.context) + len(cut.tokens) - 1, number, "recomputed", "resume")
        assert plain(again.lineage) == [(0, number, "kept", "start"), resumed]

    # ── Sleep ────────────────────────────────────────────────────────────────────────────────────────────

    @scenario
    async def test_an_engine_that_slept_goes_on_where_it_was(self, serving: Serving) -> None:
        self.needs("sleep")
        engine = serving.engine
        number = await publish(serving)
        whole = await engine.sample(request([1, 2, 3], serving.long_tokens, seed=4))
        begun = start(serving, [1, 2, 3], seed=4)
        await running(engine, 1)
        await engine.sleep(True)
        before = await engine.usage()
        waiting, unlucky = asyncio.create_task(engine.sample(request([1], 2))), request([1], 2)
        cut = asyncio.create_task(engine.sample(unlucky))
        await asyncio.sleep(0.1)
        engine.cut(unlucky.id)
        turn = await cut
        assert (turn.stop, len(turn.tokens)) == ("cancelled", 0)
        assert (await engine.usage()).busy_s == before.busy_s
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).versions.tolist() == [number] * 2
        turn = await begun
        assert turn.tokens.tolist() == whole.tokens.tolist()
        start_, slept = plain(turn.lineage)
        assert start_ == (0, number, "kept", "start")
        assert slept[1:] == (number, "recomputed", "sleep")
        assert 3 <= slept[0] < 3 + serving.long_tokens

    @scenario
    async def test_an_engine_that_slept_without_its_weights_wakes_with_new_ones(self, serving: Serving) -> None:
        self.needs("sleep")
        engine = serving.engine
        old = await publish(serving)
        begun = start(serving, [1, 2, 3])
        await running(engine, 1)
        await engine.sleep(False)
        with pytest.raises(HeadraceError, match="before it wakes"):
            await engine.wake()
        new = await publish(serving)
        await engine.wake()
        turn = await begun
        assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)
        changes = np.flatnonzero(np.diff(turn.versions)) + 1
        assert turn.versions[[0, -1]].tolist() == [old, new]
        rebuilt = (len(turn.context) + int(changes[0]) - 1, new, "recomputed", "sleep")
        assert plain(turn.lineage) == [(0, old, "kept", "start"), rebuilt]
        await serves(engine, new)

    @scenario
    async def test_sleeping_twice_is_sleeping_and_waking_twice_is_being_awake(self, serving: Serving) -> None:
        self.needs("sleep")
        engine = serving.engine
        old = await publish(serving)
        for _ in range(2):
            await engine.sleep(True)
        for _ in range(2):
            await engine.wake()
        await serves(engine, old)
        await engine.sleep(True)
        await engine.sleep(False)
        with pytest.raises(HeadraceError, match="before it wakes"):
            await engine.wake()
        new = await publish(serving)
        await engine.wake()
        await serves(engine, new)


def _went_on(serving: Serving, turn: Turn, old: int, new: int, before: str) -> None:
    """The turn ran through a swap to its full length."""
    changes = np.flatnonzero(np.diff(turn.versions)) + 1
    assert turn.versions[[0, -1]].tolist() == [old, new]
    assert len(changes) == 1
    # The pass over the token before the first new one is the first under the new weights.
    position = len(turn.context) + int(changes[0]) - 1
    assert plain(turn.lineage) == [(0, old, "kept", "start"), (position, new, before, "swap")]
    assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)
