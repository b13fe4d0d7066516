"""The controller's client of an engine in a process of its own (serve.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.engine.messages import (
    Abandon,
    AbandonSwap,
    Announce,
    AskFingerprint,
    AskUsage,
    Cut,
    Release,
    Sample,
    Score,
    SetPaused,
    Sleep,
    Swap,
    Transfer,
    Verify,
    Wake,
)
from headrace.errors import DeadlineExceeded, HeadraceError
from headrace.ipc import Peer
from headrace.records import Turn
from headrace.sync.base import Manifest, Seal
from headrace.usage import Usage


class RemoteEngine:
    """The Engine of a process, over its peer."""

    def __init__(
        self,
        peer: Peer,
        *,
        deadline_s: float,
        close_s: float,
        on_death: Callable[[RemoteEngine], None] = lambda engine: None,
    ):
        self.name = peer.name
        self.load = 0
        self._deadline_s = deadline_s
        self._close_s = close_s
        self._on_death = on_death
        self._before = self._latest = Usage()
        """What the processes before this one did, and this one."""
        self.adopt(peer)

    def adopt(self, peer: Peer) -> None:
        """Serve by this process from now on. It has no weights yet."""
        self.peer = peer
        done = msgspec.structs.replace(self._latest, running=0, waiting=0)
        self._before, self._latest = self._before.plus(done), Usage()
        self._version = -1

        def died(future: asyncio.Future[HeadraceError]) -> None:
            if self.peer is peer and not future.cancelled() and not peer.stopping:
                self._on_death(self)

        peer.died.add_done_callback(died)

    @property
    def version(self) -> int:
        """-1: none was acknowledged by the process there is, or it has died. It is so from that very moment on: who
        asks for an engine that serves must not get this one, again and again."""
        return -1 if self.peer.died.done() else self._version

    async def sample(self, request: SampleRequest) -> Turn:
        return await self._turn(Sample(call=self.peer.next_call(), request=request))

    async def score(self, request: ScoreRequest) -> Turn:
        return await self._turn(Score(call=self.peer.next_call(), request=request))

    def cut(self, request_id: int) -> None:
        self._tell(Cut(request_id=request_id))

    def release(self, request_id: int) -> None:
        self._tell(Release(request_id=request_id))

    async def announce(self, manifest: Manifest) -> None:
        await self._call(Announce(call=self.peer.next_call(), manifest=manifest))

    async def transfer(self, number: int) -> None:
        await self._call(Transfer(call=self.peer.next_call(), number=number))

    async def verify(self, seal: Seal) -> None:
        await self._call(Verify(call=self.peer.next_call(), seal=seal))

    async def swap(self, number: int, interrupt: Interrupt) -> SwapReport:
        call = self.peer.next_call()
        try:
            reply = await self._call(Swap(call=call, number=number, interrupt=interrupt))
        except (asyncio.CancelledError, DeadlineExceeded):
            self._tell(AbandonSwap(swap_call=call))
            raise
        self._version = number
        return reply.report

    async def fingerprint(self, adapter: str | None = None) -> Seal:
        return (await self._call(AskFingerprint(call=self.peer.next_call(), adapter=adapter))).seal

    async def pause(self) -> None:
        await self._call(SetPaused(call=self.peer.next_call(), paused=True))

    async def resume(self) -> None:
        await self._call(SetPaused(call=self.peer.next_call(), paused=False))

    async def sleep(self, keep_weights: bool) -> None:
        await self._call(Sleep(call=self.peer.next_call(), keep_weights=keep_weights))

    async def wake(self) -> None:
        await self._call(Wake(call=self.peer.next_call()))

    async def usage(self) -> Usage:
        """Of all its processes; of one that died, what it had told last."""
        self._latest = (await self._call(AskUsage(call=self.peer.next_call()))).usage
        return self._before.plus(self._latest)

    async def close(self) -> None:
        await self.peer.close(self._close_s)

    async def _turn(self, record: Sample | Score) -> Turn:
        self.load += 1
        answered = False
        try:
            reply = await self.peer.call(record)
            answered = True
            return reply.turn
        except HeadraceError:
            answered = True
            raise
        finally:
            self.load -= 1
            if not answered:
                self._tell(Abandon(request_id=record.request.id))

    def _tell(self, record: Any) -> None:
        """Nobody waits for what becomes of it."""
        if not self.peer.died.done():
            self.peer.tell(record)

    async def _call(self, record: Any) -> Any:
        return await self.peer.call(record, deadline_s=self._deadline_s)
