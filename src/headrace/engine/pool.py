"""Several engines as one: requests go to one of them, weights to all."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.engine.base import Engine, SampleRequest, ScoreRequest
from headrace.records import Turn
from headrace.usage import Usage


class LoadedEngine(Engine, Protocol):
    """An engine that knows how many requests it has not answered."""

    @property
    def load(self) -> int: ...


class EnginePool:
    """Samples where the prompt was seen before, unless that engine is much busier than another.

    What a swap interrupts ("resume") is taken up again here: a turn comes back whole, or cut by `cut`.
    """

    def __init__(self, engines: Sequence[LoadedEngine]):
        self.members = list(engines)
        self._serving: dict[int, LoadedEngine] = {}
        self._holding: dict[int, LoadedEngine] = {}
        self._cut: set[int] = set()

    @property
    def version(self) -> int:
        """What the slowest member serves."""
        return min(engine.version for engine in self.members)

    async def sample(self, request: SampleRequest) -> Turn:
        engine = self._choose(request)
        self._serving[request.id] = engine
        try:
            turn = await engine.sample(request)
            while turn.stop == "cancelled" and request.id not in self._cut:
                turn = await engine.sample(_rest(request, turn))
        finally:
            del self._serving[request.id]
            self._cut.discard(request.id)
        if request.hold:
            self._holding[request.id] = engine
        return turn

    async def score(self, request: ScoreRequest) -> Turn:
        return await self._least_loaded.score(request)

    def cut(self, request_id: int) -> None:
        engine = self._serving.get(request_id)
        if engine is not None:
            self._cut.add(request_id)
            engine.cut(request_id)

    def release(self, request_id: int) -> None:
        engine = self._holding.pop(request_id, None)
        if engine is not None:
            engine.release(request_id)

    async def usage(self) -> Usage:
        """The members' usage, added up."""
        parts = await asyncio.gather(*(engine.usage() for engine in self.members))
        return Usage(
            busy_s=sum(p.busy_s for p in parts),
            idle_s=sum(p.idle_s for p in parts),
            overhead_s=sum(p.overhead_s for p in parts),
            tokens=sum(p.tokens for p in parts),
            running=sum(p.running for p in parts),
            waiting=sum(p.waiting for p in parts),
        )

    @property
    def _least_loaded(self) -> LoadedEngine:
        return min(self.members, key=lambda engine: engine.load)

    def _choose(self, request: SampleRequest) -> LoadedEngine:
        if request.fork_of is not None:
            # One that nobody serves or holds is refused by whichever member gets it.
            known = self._serving.get(request.fork_of) or self._holding.get(request.fork_of)
            return known or self._least_loaded
        if len(self.members) == 1:
            return self.members[0]
        preferred = self.members[zlib.crc32(request.context.tobytes()) % len(self.members)]
        least = self._least_loaded
        return preferred if preferred.load <= 1.25 * least.load + 8 else least


def _rest(request: SampleRequest, turn: Turn) -> SampleRequest:
    """What is left of a request after the turn that a swap interrupted."""
    return msgspec.structs.replace(request, context=turn.context, fork_of=None, fork_at=0, begun=turn)
