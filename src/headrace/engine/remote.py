"""An engine in a process of its own: the process's loop, the controller's client, and what passes between.

main thread     requests, forward passes, swaps          ─┐
sync thread     announce, transfer, verify into standby   ├─ one process
reading thread  sorts messages to the two                ─┘
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.engine.base import Interrupt, SampleRequest, ScoreRequest, SwapReport
from headrace.engine.config import NativeEngineConfig
from headrace.errors import DeadlineExceeded, EpisodeFailure, HeadraceError, SyncError
from headrace.ipc import BlockingChannel, Peer, Stop, error_to_record
from headrace.records import Record, Turn, message
from headrace.sync.base import Manifest, Receiver
from headrace.usage import Stopwatch, Usage

if TYPE_CHECKING:
    from headrace.engine.native.core import NativeEngine


@message
class EngineReady(Record):
    call: int


@message
class Sample(Record):
    call: int
    request: SampleRequest


@message
class Score(Record):
    call: int
    request: ScoreRequest


@message
class Sampled(Record):
    """Answers both."""

    call: int
    turn: Turn


@message
class Abandon(Record):
    """Forget a request: nobody waits for it any more."""

    request_id: int


@message
class Cut(Record):
    request_id: int


@message
class Release(Record):
    request_id: int


@message
class Announce(Record):
    call: int
    manifest: Manifest


@message
class Transfer(Record):
    call: int
    number: int


@message
class Verify(Record):
    call: int
    number: int


@message
class Swap(Record):
    call: int
    number: int
    interrupt: Interrupt


@message
class AbandonSwap(Record):
    """Nobody waits any more for the answer to a Swap: if it has not happened yet, it shall not."""

    swap_call: int


@message
class Swapped(Record):
    call: int
    report: SwapReport


@message
class SetPaused(Record):
    call: int
    paused: bool


@message
class Sleep(Record):
    call: int
    keep_weights: bool


@message
class Wake(Record):
    call: int


@message
class AskUsage(Record):
    call: int


@message
class TellUsage(Record):
    call: int
    usage: Usage


@message
class Ok(Record):
    call: int


# ── The engine's process ─────────────────────────────────────────────────────────────────────────────────


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """The process's entry."""
    import torch

    from headrace.engine.native import core
    from headrace.models import load_model
    from headrace.sync import open_receiver
    from headrace.tokenizer import Tokenizer

    config = msgspec.convert(options["engine"], NativeEngineConfig)
    torch.set_num_threads(options["threads"])
    device = _device(config.device)
    tokenizer = Tokenizer(options["model"])
    model = load_model(options["model"], dtype=getattr(torch, config.dtype), device=device)
    engine = core.NativeEngine(
        model,
        config,
        version=-1,
        eos_tokens=tokenizer.eos_tokens,
        decode=tokenizer.decode,
        name=options["name"],
    )
    EngineServer(sock, engine, open_receiver(options["channel"])).serve()


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class EngineServer:
    """Feeds an engine from its channel until told to stop."""

    def __init__(self, sock: socket.socket, engine: NativeEngine, receiver: Receiver):
        self._engine = engine
        self._sync = _Standby(engine.name, lambda: engine.standby, receiver, self._answer)
        self._channel = BlockingChannel(sock, divert=self._sync.take)
        self._calls: dict[int, int] = {}
        self._waiting_swap: Swap | None = None
        """Waits for requests to end."""
        self._paused = False
        self._watch = Stopwatch()
        self._channel.send(EngineReady(call=0))

    def serve(self) -> None:
        while True:
            if not self._may_step:
                with self._watch.state("idle"):
                    first = self._channel.receive()
                if not self._handle(first):
                    return
            for record in self._channel.receive_waiting():
                if not self._handle(record):
                    return
            if self._may_step:
                with self._watch.state("busy"):
                    ended = self._engine.step(admit=self._waiting_swap is None)
                self._send_turns(ended)
            self._swap_once_drained()

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and not self._paused

    def _send_turns(self, ended: list[tuple[int, Turn]]) -> None:
        replies = []
        for request_id, turn in ended:
            call = self._calls.pop(request_id, None)
            if call is not None:
                replies.append(Sampled(call=call, turn=turn))
        if replies:
            self._channel.send(*replies)

    def _handle(self, record: Any) -> bool:
        engine = self._engine
        if isinstance(record, Sample | Score):
            self._add(record)
        elif isinstance(record, Abandon):
            self._calls.pop(record.request_id, None)
            engine.cancel(record.request_id)
            engine.release(record.request_id)
        elif isinstance(record, Cut):
            turn = engine.cut(record.request_id)
            if turn is not None:
                self._send_turns([(record.request_id, turn)])
        elif isinstance(record, Release):
            engine.release(record.request_id)
        elif isinstance(record, Swap):
            self._begin_swap(record)
        elif isinstance(record, AbandonSwap):
            if self._waiting_swap is not None and self._waiting_swap.call == record.swap_call:
                self._waiting_swap = None
        elif isinstance(record, SetPaused):
            self._paused = record.paused
            self._channel.send(Ok(call=record.call))
        elif isinstance(record, Sleep | Wake):
            self._sleep_or_wake(record)
        elif isinstance(record, AskUsage):
            usage = self._watch.usage(tokens=engine.tokens_sampled, running=engine.running, waiting=engine.waiting)
            self._channel.send(TellUsage(call=record.call, usage=usage))
        elif isinstance(record, Stop):
            return False
        return True

    def _add(self, record: Sample | Score) -> None:
        try:
            if isinstance(record, Sample):
                self._engine.add(record.request)
            else:
                self._engine.score(record.request)
            self._calls[record.request.id] = record.call
        except EpisodeFailure as failure:
            self._channel.send(error_to_record(record.call, failure))

    def _begin_swap(self, record: Swap) -> None:
        try:
            if self._waiting_swap is not None:
                why = f"the swap to version {self._waiting_swap.number} waits already"
                raise SyncError("swap", self._engine.name, why)
            self._sync.require_verified(record.number)
        except SyncError as error:
            self._channel.send(error_to_record(record.call, error))
        else:
            self._waiting_swap = record
            self._swap_once_drained()

    def _swap_once_drained(self) -> None:
        record = self._waiting_swap
        if record is None or self._engine.must_drain(record.interrupt):
            return
        self._waiting_swap = None
        begun = time.perf_counter()
        try:
            with self._sync.at_rest("swap"):
                self._sync.require_verified(record.number)
                report = self._engine.swap(record.number, record.interrupt)
                self._sync.forget()
        except HeadraceError as error:
            self._channel.send(error_to_record(record.call, error))
            return
        report = msgspec.structs.replace(report, pause_s=time.perf_counter() - begun)
        self._channel.send(Swapped(call=record.call, report=report))

    def _sleep_or_wake(self, record: Sleep | Wake) -> None:
        try:
            with self._sync.at_rest("sleep" if isinstance(record, Sleep) else "wake"):
                if isinstance(record, Sleep):
                    self._sync.forget()
                    self._engine.sleep(keep_weights=record.keep_weights)
                else:
                    self._engine.wake()
        except HeadraceError as error:
            self._channel.send(error_to_record(record.call, error))
        else:
            self._channel.send(Ok(call=record.call))

    def _answer(self, record: Any) -> None:
        self._channel.send(record)


class _Standby:
    """Stages 1 to 3, on a thread of their own: what is announced, what has arrived, what is verified."""

    def __init__(
        self,
        name: str,
        standby: Callable[[], Mapping[str, Any]],
        receiver: Receiver,
        answer: Callable[[Any], None],
    ):
        self._name = name
        self._standby = standby
        self._receiver = receiver
        self._answer = answer
        self._manifest: Manifest | None = None
        self._verified: int | None = None
        self._in_stage = threading.Lock()
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="headrace-sync", daemon=True).start()

    def take(self, record: Any) -> bool:
        if isinstance(record, Announce | Transfer | Verify):
            self._work.put(record)
            return True
        return False

    def require_verified(self, number: int) -> None:
        if self._verified != number:
            raise SyncError(
                "swap", self._name, f"version {number} is not verified in standby (it has {self._verified})"
            )

    @contextmanager
    def at_rest(self, what: str) -> Iterator[None]:
        """No stage begins within, so nobody writes to the standby buffers. Refused while one is under way."""
        if not self._in_stage.acquire(blocking=False):
            raise SyncError(what, self._name, "a version is being announced, transferred or verified")
        try:
            yield
        finally:
            self._in_stage.release()

    def forget(self) -> None:
        self._manifest = self._verified = None

    def _run(self) -> None:
        while True:
            record = self._work.get()
            try:
                with self._in_stage:
                    self._stage(record)
                self._answer(Ok(call=record.call))
            except Exception as error:
                self._answer(error_to_record(record.call, error))

    def _stage(self, record: Any) -> None:
        from headrace.sync import check_manifest, verify

        if isinstance(record, Announce):
            self.forget()
            check_manifest(record.manifest, self._standby(), who=self._name)
            self._manifest = record.manifest
            return
        manifest = self._manifest
        if manifest is None or manifest.version.number != record.number:
            stage = type(record).__name__.lower()
            raise SyncError(stage, self._name, f"version {record.number} was not announced")
        tensors = self._standby()
        if isinstance(record, Transfer):
            self._verified = None
            self._receiver.receive(manifest, tensors)
        else:
            verify(manifest, tensors, who=self._name)
            self._verified = record.number


# ── The controller's client ──────────────────────────────────────────────────────────────────────────────


class RemoteEngine:
    """The Engine of a process, over its peer."""

    def __init__(self, peer: Peer, *, deadline_s: float, close_s: float):
        self.name = peer.name
        self.peer = peer
        self.load = 0
        self._deadline_s = deadline_s
        self._close_s = close_s
        self._version = -1

    @property
    def version(self) -> int:
        return self._version

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

    async def verify(self, number: int) -> None:
        await self._call(Verify(call=self.peer.next_call(), number=number))

    async def swap(self, number: int, interrupt: Interrupt) -> SwapReport:
        call = self.peer.next_call()
        try:
            reply = await self._call(Swap(call=call, number=number, interrupt=interrupt))
        except (asyncio.CancelledError, DeadlineExceeded):
            self._tell(AbandonSwap(swap_call=call))
            raise
        self._version = number
        return reply.report

    async def pause(self) -> None:
        await self._call(SetPaused(call=self.peer.next_call(), paused=True))

    async def resume(self) -> None:
        await self._call(SetPaused(call=self.peer.next_call(), paused=False))

    async def sleep(self, keep_weights: bool) -> None:
        await self._call(Sleep(call=self.peer.next_call(), keep_weights=keep_weights))

    async def wake(self) -> None:
        await self._call(Wake(call=self.peer.next_call()))

    async def usage(self) -> Usage:
        return (await self._call(AskUsage(call=self.peer.next_call()))).usage

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
