"""Several engines as one: requests go to one of them, weights to all."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce

import msgspec

from headrace.engine.base import Engine, SampleRequest, ScoreRequest
from headrace.errors import ComponentDied, DeadlineExceeded, EpisodeFailure
from headrace.records import Turn
from headrace.usage import Usage

_LOOK_EVERY_S = 0.05


class EnginePool:
    """Samples where the prompt was seen before, unless that engine is much busier than another.

    What a swap interrupts ("resume") is taken up again here: a turn comes back whole, or cut by `cut`. What an
    engine's death interrupts begins again at a member that serves.
    """

    def __init__(self, engines: Sequence[Engine], *, adapter: str | None = None, revive_s: float = 600.0):
        """Requests that name no adapter get `adapter`. While no member serves, because it is being replaced,
        requests wait for up to `revive_s`."""
        self.members = list(engines)
        self._adapter = adapter
        self._revive_s = revive_s
        self._open: dict[int, Engine | None] = {}
        """Who serves a request that is not answered; None: nobody yet, or nobody any more."""
        self._holding: dict[int, Engine] = {}
        self._cut: set[int] = set()
        self._usage: dict[str, Usage] = {}
        self._requests: Counter[str] = Counter()
        """By the names of members."""
        self.on_idle_changed: Callable[[], None] = lambda: None
        """Called when a member has got its first request, or has answered its last."""

    @property
    def version(self) -> int:
        """What the slowest member serves; -1: none does. One that is being replaced serves nothing."""
        return min((engine.version for engine in self._serving_members), default=-1)

    @property
    def _serving_members(self) -> list[Engine]:
        return [engine for engine in self.members if engine.version >= 0]

    @property
    def idle_members(self) -> int:
        """How many have no request."""
        return len(self.members) - len(self._requests)

    async def sample(self, request: SampleRequest) -> Turn:
        if request.adapter is None and self._adapter is not None:
            request = msgspec.structs.replace(request, adapter=self._adapter)
        self._open[request.id] = None
        try:
            engine, turn = await self._sampled(request)
        finally:
            del self._open[request.id]
            self._cut.discard(request.id)
        if request.hold:
            self._holding[request.id] = engine
        return turn

    async def _sampled(self, request: SampleRequest) -> tuple[Engine, Turn]:
        while True:
            engine = await self._member(request)
            if request.id in self._cut:
                raise EpisodeFailure("late", "it was cut while its engine was being replaced")
            self._open[request.id] = engine
            self._count_request(engine, 1)
            try:
                turn = await engine.sample(request)
                while turn.stop == "cancelled" and request.id not in self._cut:
                    turn = await engine.sample(_rest(request, turn))
                return engine, turn
            except ComponentDied:
                self._open[request.id] = None
            finally:
                self._count_request(engine, -1)

    def _count_request(self, engine: Engine, change: int) -> None:
        count = self._requests[engine.name] + change
        if count:
            self._requests[engine.name] = count
        else:
            del self._requests[engine.name]
        if count == max(change, 0):
            self.on_idle_changed()

    async def score(self, request: ScoreRequest) -> Turn:
        if request.adapter is None and self._adapter is not None:
            request = msgspec.structs.replace(request, adapter=self._adapter)
        while True:
            engine = await self._member(None)
            self._count_request(engine, 1)
            try:
                return await engine.score(request)
            except ComponentDied:
                continue
            finally:
                self._count_request(engine, -1)

    def cut(self, request_id: int) -> None:
        if request_id in self._open:
            self._cut.add(request_id)
            engine = self._open[request_id]
            if engine is not None:
                engine.cut(request_id)

    def release(self, request_id: int) -> None:
        engine = self._holding.pop(request_id, None)
        if engine is not None:
            engine.release(request_id)

    async def usage(self) -> Usage:
        """The members' usage, added up; of one that is being replaced, what it told last."""
        await asyncio.gather(*(self._ask_usage(engine) for engine in self.members))
        return reduce(Usage.plus, self._usage.values(), Usage())

    async def _ask_usage(self, engine: Engine) -> None:
        try:
            self._usage[engine.name] = await engine.usage()
        except ComponentDied:
            pass

    async def _member(self, request: SampleRequest | None) -> Engine:
        """Who is to serve it, once somebody does."""
        try:
            async with asyncio.timeout(self._revive_s):
                while not (serving := self._serving_members):
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            raise DeadlineExceeded(
                "a request", "an engine that serves", self._revive_s, "events.jsonl, and the engines' logs"
            ) from None
        return _choose(request, serving, self._at(request.fork_of) if request is not None else None)

    def _at(self, request_id: int | None) -> Engine | None:
        """Who serves or holds it."""
        if request_id is None:
            return None
        return self._open.get(request_id) or self._holding.get(request_id)


def _choose(request: SampleRequest | None, engines: Sequence[Engine], source: Engine | None) -> Engine:
    least = min(engines, key=lambda engine: engine.load)
    if request is None or request.fork_of is not None:
        # A source that nobody serves or holds any more is refused by whichever member gets the request.
        return source if source in engines and source is not None else least
    preferred = engines[zlib.crc32(request.context.tobytes()) % len(engines)]
    return preferred if preferred.load <= 1.25 * least.load + 8 else least


def _rest(request: SampleRequest, turn: Turn) -> SampleRequest:
    """What is left of a request after the turn that a swap interrupted."""
    return msgspec.structs.replace(request, context=turn.context, fork_of=None, fork_at=0, begun=turn)
