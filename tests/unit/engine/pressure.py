"""An engine under pressure, and what every request would have sampled undisturbed.

Requests are added faster than a small cache can hold them; some are cancelled, some are forked while they run or
after, and weights are swapped for bit-identical ones under new version numbers. In exact mode none of that may
change a single bit of what a request samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from engine_builders import all_free

from headrace.engine.base import SampleRequest
from headrace.engine.native import NativeEngine
from headrace.errors import EpisodeFailure
from headrace.records import Sampling, Turn

SAMPLINGS = (Sampling(), Sampling(temperature=0.8), Sampling(top_p=0.9), Sampling(top_k=20, min_p=0.02))


@dataclass
class Pressure:
    """`make(cache_tokens)` gives a fresh engine over the same weights, with a cache of that size or a large one."""

    make: Callable[[int | None], NativeEngine]
    vocabulary: int
    seed: int = 0
    prompt: tuple[int, int] = (8, 60)
    tokens: tuple[int, int] = (4, 80)
    wanted: list[SampleRequest] = field(default_factory=list)
    """What to sample undisturbed, under the ids of the disturbed run: a fork there is a plain request here."""
    turns: dict[int, Turn] = field(default_factory=dict)
    forks: int = 0
    cancelled: int = 0
    swaps: int = 0
    preempted: int = 0

    def run(self, requests: int, cache_tokens: int, at_least_s: float = 0.0) -> None:
        """Disturb an engine with so many requests, again and again for that long; then compare every survivor."""
        began, rounds = time.monotonic(), 0
        while rounds == 0 or time.monotonic() - began < at_least_s:
            self._round(requests, cache_tokens, rounds)
            rounds += 1

    def _round(self, requests: int, cache_tokens: int, number: int) -> None:
        dice = np.random.default_rng([self.seed, number])
        self.wanted, self.turns = [], {}
        engine = self.make(cache_tokens)
        coming = [self._request(dice, i) for i in range(requests)]
        self.wanted = list(coming)
        coming.reverse()
        next_id, last_progress = requests, 0
        while coming or engine.has_work:
            for _ in range(min(len(coming), int(dice.integers(0, 40)))):
                engine.add(coming.pop())
            if dice.random() < 0.1:
                self._cancel(engine, dice)
            if dice.random() < 0.1:
                next_id = self._fork(engine, dice, next_id)
            if dice.random() < 0.05:
                # The standby set is a copy of the live one.
                engine.swap(engine.version + 1, "keep" if dice.random() < 0.7 else "recompute")
                self.swaps += 1
            self.turns.update(engine.step())
            last_progress = last_progress + 1
            assert last_progress < 1_000_000, "the engine makes no progress"
        self._finish(engine)

    def _finish(self, engine: NativeEngine) -> None:
        assert all_free(engine), "a page was lost"
        self.preempted += sum(any(e.cause == "preempt" for e in turn.lineage) for turn in self.turns.values())
        calm = self.make(None)
        survivors = [request for request in self.wanted if request.id in self.turns]
        for request in survivors:
            calm.add(request)
        while calm.has_work:
            for id, turn in calm.step():
                theirs = self.turns[id]
                assert turn.tokens.tolist() == theirs.tokens.tolist(), f"request {id} sampled other tokens"
                assert turn.logprobs.tobytes() == theirs.logprobs.tobytes(), f"request {id} has other log-probs"

    def _request(self, dice: np.random.Generator, id: int) -> SampleRequest:
        group = np.random.default_rng([self.seed, 7, id // 4])
        context = group.integers(0, self.vocabulary, int(group.integers(*self.prompt))).astype(np.int32)
        return SampleRequest(
            id=id,
            context=context,
            max_tokens=int(dice.integers(*self.tokens)),
            sampling=SAMPLINGS[id % len(SAMPLINGS)],
            seed=1000 + id,
            hold=id % 11 == 0,
        )

    def _cancel(self, engine: NativeEngine, dice: np.random.Generator) -> None:
        running = list(engine._sequences)
        if running:
            victim = int(dice.choice(running))
            engine.cancel(victim)
            self.cancelled += 1
            self.wanted = [request for request in self.wanted if request.id != victim]

    def _fork(self, engine: NativeEngine, dice: np.random.Generator, id: int) -> int:
        sources = [s for s in engine._sequences.values() if s.slot is not None] + list(
            engine._scheduler.held.values()
        )
        if not sources:
            return id
        source = sources[int(dice.integers(len(sources)))]
        slot = source.slot
        own = source.tokens if slot is None else engine._slots.columns(slot)[0]
        whole = np.concatenate([source.context, own])
        at = int(dice.integers(1, len(whole) + 1))
        more = dice.integers(0, self.vocabulary, int(dice.integers(0, 3))).astype(np.int32)
        limit, seed = int(dice.integers(*self.tokens)), int(dice.integers(2**31))
        options = {"max_tokens": limit, "seed": seed, "sampling": SAMPLINGS[id % len(SAMPLINGS)]}
        try:
            engine.add(SampleRequest(id=id, context=more, fork_of=source.request.id, fork_at=at, **options))
        except EpisodeFailure:
            # It ended in a step whose outcome was not known yet, and was not to be held.
            return id
        self.wanted.append(SampleRequest(id=id, context=np.concatenate([whole[:at], more]), **options))
        self.forks += 1
        return id + 1
