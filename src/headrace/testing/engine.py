"""What every engine does: serve requests, take new weights in stages, and say truly which weights made a token."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.errors import EpisodeFailure
from headrace.records import Sampling
from headrace.testing.forks import ForkTests
from headrace.testing.interrupts import InterruptTests
from headrace.testing.loops import until
from headrace.testing.serving import (
    Serving,
    changed,
    fingerprint,
    has,
    plain,
    plain_seal,
    publish,
    refused,
    request,
    running,
    scenario,
    score,
    serves,
    stage,
    start,
    take_in,
)


class EngineContract(InterruptTests, ForkTests):
    """Subclass as TestMyEngine with a fixture `serving`, of any scope, that gives a Serving.

    A backend that cannot do everything says in `supports` what it can.
    """

    # ── Sampling ─────────────────────────────────────────────────────────────────────────────────────────

    @scenario
    async def test_a_turn_has_its_columns_its_lineage_and_what_it_was_asked_for(self, serving: Serving) -> None:
        number = await publish(serving)
        asked = request([3, 1, 2], 7, sampling=Sampling(temperature=0.5), seed=9, policy="mine")
        turn = await serving.engine.sample(asked)
        assert (turn.tokens.dtype, turn.logprobs.dtype, turn.versions.dtype) == (np.int32, np.float32, np.int32)
        assert 1 <= len(turn.tokens) <= 7
        assert turn.stop == ("length" if len(turn.tokens) == 7 else "end")
        assert ((turn.tokens >= 0) & (turn.tokens < serving.vocab_size)).all()
        assert (np.isfinite(turn.logprobs) & (turn.logprobs <= 0)).all()
        assert turn.versions.tolist() == [number] * len(turn.tokens)
        assert plain(turn.lineage) == [(0, number, "kept", "start")]
        assert turn.context.tolist() == [3, 1, 2]
        assert (turn.sampling.temperature, turn.seed, turn.policy) == (0.5, 9, "mine")
        assert turn.engine == serving.engine.name

    @scenario
    async def test_a_turn_is_never_longer_than_asked(self, serving: Serving) -> None:
        for most in (1, 2, 5):
            turn = await serving.engine.sample(request([1, 2], most))
            assert len(turn.tokens) <= most
            assert turn.stop == "length" or len(turn.tokens) < most

    @scenario
    async def test_a_stop_token_ends_a_turn_and_is_part_of_it(self, serving: Serving) -> None:
        turn = await serving.engine.sample(request([1, 2], 9, stop_tokens=tuple(range(serving.vocab_size))))
        assert (turn.stop, len(turn.tokens), len(turn.logprobs)) == ("end", 1, 1)

    @scenario
    async def test_truncated_sampling_brings_its_supports(self, serving: Serving) -> None:
        for sampling, most in ((Sampling(temperature=0.0), 1), (Sampling(top_k=3), 3)):
            turn = await serving.engine.sample(request([1, 2], 6, sampling=sampling))
            assert turn.support is not None
            rows = [turn.support.row(t).tolist() for t in range(len(turn.tokens))]
            assert all(1 <= len(row) <= most for row in rows)
            assert all(token in row for token, row in zip(turn.tokens.tolist(), rows, strict=True))
            alone = [t for t, row in enumerate(rows) if len(row) == 1]
            np.testing.assert_allclose(turn.logprobs[alone], 0.0, atol=1e-6)

    @scenario
    async def test_scoring_gives_the_log_probs_that_sampling_recorded(self, serving: Serving) -> None:
        self.needs("score")
        number = await publish(serving)
        for sampling in (Sampling(), Sampling(temperature=0.6)):
            turn = await serving.engine.sample(request([3, 1, 2], 20, sampling=sampling, policy="mine"))
            scored = await score(serving, turn)
            np.testing.assert_allclose(scored.logprobs, turn.logprobs, atol=1e-4)
            assert scored.tokens.tolist() == turn.tokens.tolist()
            assert scored.context.tolist() == [3, 1, 2]
            assert scored.versions.tolist() == [number] * len(turn.tokens)
            assert plain(scored.lineage) == [(0, number, "kept", "start")]
            assert (scored.logprobs.dtype, scored.versions.dtype) == (np.float32, np.int32)
            assert (scored.stop, scored.engine) == ("length", serving.engine.name)
        nothing = changed(turn, tokens=turn.tokens[:0], logprobs=turn.logprobs[:0], versions=turn.versions[:0])
        for bad in (nothing, changed(turn, context=turn.context[:0])):
            with pytest.raises(EpisodeFailure) as caught:
                await score(serving, bad)
            assert caught.value.reason == "bad_request"

    @scenario
    async def test_a_hundred_requests_at_once_each_get_their_own_answer(self, serving: Serving) -> None:
        number = await publish(serving)
        asked = [request([1 + i % 5] * (1 + i % 7), 1 + i % 11, seed=i) for i in range(100)]
        turns = await asyncio.gather(*(serving.engine.sample(one) for one in asked))
        for one, turn in zip(asked, turns, strict=True):
            assert turn.context.tolist() == one.context.tolist()
            assert turn.seed == one.seed
            assert len(turn.tokens) == one.max_tokens or turn.stop == "end"
            assert set(turn.versions.tolist()) == {number}

    @scenario
    async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(self, serving: Serving) -> None:
        alone = await serving.engine.sample(request([1, 2, 3], 12, seed=5))
        crowd = [request([i % 7, 2, 3], 12, seed=100 + i) for i in range(20)]
        turns = await asyncio.gather(
            *(serving.engine.sample(one) for one in [*crowd, request([1, 2, 3], 12, seed=5)])
        )
        assert turns[-1].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(turns[-1].logprobs, alone.logprobs, atol=1e-4)

    @scenario
    async def test_a_bad_request_fails_alone(self, serving: Serving) -> None:
        engine = serving.engine
        good = [request([1, 2, i], serving.long_tokens) for i in range(3)]
        tasks = [asyncio.create_task(engine.sample(one)) for one in good]
        await running(engine, 3)
        for bad in (request([], 5), request([1], 0), request([1], 5, id=good[0].id)):
            with pytest.raises(EpisodeFailure) as caught:
                await engine.sample(bad)
            assert caught.value.reason == "bad_request"
        for one, turn in zip(good, await asyncio.gather(*tasks), strict=True):
            assert turn.context.tolist() == one.context.tolist()
            assert (turn.stop, len(turn.tokens)) == ("length", serving.long_tokens)

    # ── Ending early ─────────────────────────────────────────────────────────────────────────────────────

    @scenario
    async def test_cancelling_the_waiting_task_frees_the_request_and_no_other(self, serving: Serving) -> None:
        engine = serving.engine
        first = request([1, 2], serving.long_tokens)
        cancelled, other = asyncio.create_task(engine.sample(first)), start(serving, [1, 3])
        await running(engine, 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(lambda: has(engine, running=1))
        again = await engine.sample(request([1, 2], 3, id=first.id))
        assert again.stop in ("length", "end")
        assert (await other).stop == "length"
        await until(lambda: has(engine, running=0))

    @scenario
    async def test_a_cut_request_returns_what_there_is(self, serving: Serving) -> None:
        engine = serving.engine
        number = await publish(serving)
        asked = request([1, 2, 3], serving.long_tokens)
        task = asyncio.create_task(engine.sample(asked))
        await running(engine, 1)
        await asyncio.sleep(0.05)
        engine.cut(asked.id)
        turn = await task
        assert turn.stop == "cancelled"
        assert 1 <= len(turn.tokens) < serving.long_tokens
        assert set(turn.versions.tolist()) == {number}
        assert plain(turn.lineage) == [(0, number, "kept", "start")]
        assert turn.context.tolist() == [1, 2, 3]
        await until(lambda: has(engine, running=0))

    @scenario
    async def test_cutting_an_unknown_request_changes_nothing(self, serving: Serving) -> None:
        serving.engine.cut(10**9)
        assert (await serving.engine.sample(request([1], 2))).stop in ("length", "end")

    # ── Publication ──────────────────────────────────────────────────────────────────────────────────────

    @scenario
    async def test_a_version_is_served_from_its_swap_on_and_not_before(self, serving: Serving) -> None:
        engine = serving.engine
        old = await publish(serving)
        manifest, seal = await stage(serving)
        new = manifest.version.number
        for step in (lambda: engine.announce(manifest), lambda: engine.transfer(new), lambda: engine.verify(seal)):
            await step()
            assert engine.version == old
            assert set((await engine.sample(request([1, 2], 4))).versions.tolist()) == {old}
        report = await engine.swap(new, "keep")
        assert (report.version, report.running, engine.version) == (new, 0, new)
        assert report.pause_s >= 0
        assert set((await engine.sample(request([1, 2], 4))).versions.tolist()) == {new}

    @scenario
    async def test_no_stage_can_be_skipped(self, serving: Serving) -> None:
        engine = serving.engine
        old = await publish(serving)
        manifest, seal = await stage(serving)
        new = manifest.version.number
        await refused("transfer", engine.transfer(new))
        await refused("verify", engine.verify(seal))
        await refused("swap", engine.swap(new, "keep"))
        await engine.announce(manifest)
        await refused("verify", engine.verify(seal))
        await refused("swap", engine.swap(new, "keep"))
        await engine.transfer(new)
        await refused("swap", engine.swap(new, "keep"))
        await serves(engine, old)
        await engine.verify(seal)
        await engine.transfer(new)
        await refused("swap", engine.swap(new, "keep"))
        await engine.verify(seal)
        await engine.swap(new, "keep")
        await refused("swap", engine.swap(new, "keep"))
        await serves(engine, new)

    @scenario
    async def test_a_manifest_that_does_not_fit_is_refused(self, serving: Serving) -> None:
        engine = serving.engine
        old = await publish(serving)
        manifest, _ = await stage(serving)
        first, *rest = manifest.tensors
        for tensors in (
            rest,
            [*manifest.tensors, changed(first, name="another")],
            [changed(first, shape=(*first.shape, 1)), *rest],
            [changed(first, dtype="int8"), *rest],
        ):
            await refused("announce", engine.announce(changed(manifest, tensors=tuple(tensors))))
            await refused("swap", engine.swap(manifest.version.number, "keep"))
        await serves(engine, old)
        await serves(engine, await publish(serving))

    @scenario
    async def test_weights_that_arrive_damaged_are_refused_and_the_next_ones_are_served(
        self, serving: Serving
    ) -> None:
        engine = serving.engine
        old = await publish(serving)
        manifest, seal = await stage(serving)
        new = manifest.version.number
        *rest, last = seal.checksums
        await engine.announce(manifest)
        await engine.transfer(new)
        await refused("verify", engine.verify(changed(seal, checksums=(*rest, last ^ 1))))
        await refused("swap", engine.swap(new, "keep"))
        await serves(engine, old)
        await serves(engine, await publish(serving))

    @scenario
    async def test_a_fingerprint_is_of_what_is_served_until_the_next_swap(self, serving: Serving) -> None:
        engine = serving.engine
        manifest, seal = await stage(serving)
        await take_in(engine, manifest, seal)
        assert await fingerprint(engine) == plain_seal(seal)
        later, later_seal = await stage(serving)
        *rest, last = later_seal.checksums
        await engine.announce(later)
        await engine.transfer(later_seal.number)
        assert await fingerprint(engine) == plain_seal(seal)
        await refused("verify", engine.verify(changed(later_seal, checksums=(*rest, last ^ 1))))
        await engine.verify(later_seal)
        assert await fingerprint(engine) == plain_seal(seal)
        await engine.swap(later_seal.number, "keep")
        assert await fingerprint(engine) == plain_seal(later_seal)
        assert later_seal.checksums != seal.checksums

    @scenario
    async def test_a_fingerprint_can_be_asked_for_while_the_engine_is_busy(self, serving: Serving) -> None:
        engine = serving.engine
        manifest, seal = await stage(serving)
        begun = start(serving, [1, 2])
        await running(engine, 1)
        await take_in(engine, manifest, seal)
        assert await fingerprint(engine) == plain_seal(seal)
        assert (await begun).stop == "length"

    # ── Pauses and time ──────────────────────────────────────────────────────────────────────────────────

    @scenario
    async def test_a_paused_engine_does_nothing_until_it_is_resumed(self, serving: Serving) -> None:
        engine = serving.engine
        old = await publish(serving)
        begun = start(serving, [1, 2])
        await running(engine, 1)
        await engine.pause()
        before = await engine.usage()
        waiting, unlucky = asyncio.create_task(engine.sample(request([1], 2))), request([1], 2)
        cut = asyncio.create_task(engine.sample(unlucky))
        await asyncio.sleep(0.1)
        engine.cut(unlucky.id)
        turn = await cut
        assert (turn.stop, len(turn.tokens)) == ("cancelled", 0)
        new = await publish(serving)
        assert (await engine.usage()).busy_s == before.busy_s
        assert not waiting.done()
        await engine.resume()
        assert (await waiting).versions.tolist() == [new] * 2
        turn = await begun
        assert (turn.versions[0], turn.versions[-1], len(turn.tokens)) == (old, new, serving.long_tokens)

    @scenario
    async def test_usage_adds_up_to_wall_time_and_counts_every_token(self, serving: Serving) -> None:
        engine, clock = serving.engine, asyncio.get_running_loop().time
        times, usages = [], []
        for pause_s in (0.2, 0.0):
            times.append(clock())
            usages.append(await engine.usage())
            times.append(clock())
            turns = await asyncio.gather(*(engine.sample(request([1, i], 20)) for i in range(10)))
            await asyncio.sleep(pause_s)
            if pause_s:
                sampled = sum(len(turn.tokens) for turn in turns)
        spent = usages[1].since(usages[0])
        assert times[2] - times[1] - 1e-6 <= spent.wall_s <= times[3] - times[0] + 1e-6
        assert spent.tokens == sampled
        assert spent.busy_s > 0
        assert spent.idle_s >= 0.15
        assert (spent.running, spent.waiting) == (0, 0)
