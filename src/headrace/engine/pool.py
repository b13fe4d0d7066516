"""Several engines as one: requests go to one of them, weights to all."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Protocol

from headrace.engine.base import Engine, SampleRequest
from headrace.records import Turn
from headrace.usage import Usage


class LoadedEngine(Engine, Protocol):
    """An engine that knows how many requests it has not answered."""

    load: int


class EnginePool:
    """Samples where the prompt was seen before, unless that engine is much busier than another."""

    def __init__(self, engines: Sequence[LoadedEngine]):
        self.members = list(engines)
        self._serving: dict[int, LoadedEngine] = {}

    @property
    def version(self) -> int:
        """What the slowest member serves."""
        return min(engine.version for engine in self.members)

    async def sample(self, request: SampleRequest) -> Turn:
        engine = self._choose(request)
        self._serving[request.id] = engine
        try:
            return await engine.sample(request)
        finally:
            del self._serving[request.id]

    def cut(self, request_id: int) -> None:
        engine = self._serving.get(request_id)
        if engine is not None:
            engine.cut(request_id)

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

    def _choose(self, request: SampleRequest) -> LoadedEngine:
        if len(self.members) == 1:
            return self.members[0]
        preferred = self.members[zlib.crc32(request.context.tobytes()) % len(self.members)]
        least = min(self.members, key=lambda engine: engine.load)
        return preferred if preferred.load <= 1.25 * least.load + 8 else least
