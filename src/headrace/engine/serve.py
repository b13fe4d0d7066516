"""An engine's process: its loop, and the thread that takes new weights in beside it.

main thread     requests, forward passes, swaps          ─┐
sync thread     announce, transfer, verify; fingerprints  ├─ one process
reading thread  sorts messages to the two                ─┘
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.engine.config import NativeEngineConfig
from headrace.engine.messages import (
    Abandon,
    AbandonSwap,
    AskUsage,
    Cut,
    EngineReady,
    Ok,
    Release,
    Sample,
    Sampled,
    Score,
    SetPaused,
    Sleep,
    Swap,
    Swapped,
    TellUsage,
    Wake,
)
from headrace.engine.standby import StandbyThread
from headrace.errors import EpisodeFailure, HeadraceError, SyncError
from headrace.ipc import BlockingChannel, Notice, Stop, error_to_record, settle_memory
from headrace.records import Turn
from headrace.usage import Stopwatch

if TYPE_CHECKING:
    from headrace.engine.native.core import NativeEngine
    from headrace.sync import Receiver


_TURN_S = 0.0005
"""After so long the main thread lets others run Python. By default it is 5 ms, which the stages of a publication
would wait for again and again."""
_PATIENCE = 0.9
"""Share of a stage's deadline after which an engine itself stops waiting for a sender, and says so: one that says
nothing by the deadline is stuck."""


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """The process's entry."""
    import torch

    from headrace.engine.native import core
    from headrace.models import dtype_on, load_model
    from headrace.sync import open_receiver
    from headrace.tokenizer import Tokenizer

    config = msgspec.convert(options["engine"], NativeEngineConfig)
    torch.set_num_threads(options["threads"])
    device = _device(config.device)
    tokenizer = Tokenizer(options["model"])
    model = load_model(options["model"], dtype=dtype_on(device, config.dtype), device=device)
    tokenizer.check(model.config.vocab_size)
    engine = core.NativeEngine(
        model,
        config,
        version=-1,
        eos_tokens=tokenizer.eos_tokens,
        decode=tokenizer.decode,
        name=options["name"],
    )
    patience = _PATIENCE * options["deadline_s"]
    receiver = open_receiver(options["channel"], name=options["name"], deadline_s=patience)
    EngineServer(sock, engine, receiver).serve()


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class EngineServer:
    """Feeds an engine from its channel until told to stop."""

    def __init__(self, sock: socket.socket, engine: NativeEngine, receiver: Receiver):
        self._engine = engine
        self._sync = StandbyThread(engine, receiver, self._answer)
        self._channel = BlockingChannel(sock, divert=self._sync.take)
        self._calls: dict[int, int] = {}
        self._waiting_swap: Swap | None = None
        """Waits for requests to end."""
        self._paused = False
        self._watch = Stopwatch()
        engine.on_event = lambda kind, fields: self._channel.send(Notice(kind=kind, fields=fields))
        self._channel.send(EngineReady(call=0))

    def serve(self) -> None:
        if threading.current_thread() is threading.main_thread():
            sys.setswitchinterval(_TURN_S)
            settle_memory()
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
                    ended = self._step()
                self._send_turns(ended)
            self._swap_once_drained()

    def _step(self) -> list[tuple[int, Turn]]:
        """While a swap waits, nothing begins that it would have to wait for."""
        if self._waiting_swap is None:
            return self._engine.step()
        adapter = self._sync.adapter
        return self._engine.step(admit=adapter is not None, but=adapter)

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
            held, allocated = engine.device_peaks()
            usage = msgspec.structs.replace(usage, device_peak=held, device_allocated=allocated)
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
        if record is None or self._engine.must_drain(record.interrupt, self._sync.adapter):
            return
        self._waiting_swap = None
        begun = time.perf_counter()
        try:
            with self._sync.at_rest("swap"):
                manifest = self._sync.require_verified(record.number)
                if manifest.adapter is None:
                    report = self._engine.swap(record.number, record.interrupt)
                else:
                    report = self._engine.swap_adapter(manifest.adapter.name, record.number, record.interrupt)
                self._sync.swapped()
        except HeadraceError as error:
            self._channel.send(error_to_record(record.call, error))
            return
        report = msgspec.structs.replace(report, pause_s=time.perf_counter() - begun)
        self._channel.send(Swapped(call=record.call, report=report))

    def _sleep_or_wake(self, record: Sleep | Wake) -> None:
        try:
            with self._sync.at_rest("sleep" if isinstance(record, Sleep) else "wake"):
                if isinstance(record, Sleep):
                    self._sync.let_go()
                    self._engine.sleep(keep_weights=record.keep_weights)
                else:
                    self._engine.wake()
        except HeadraceError as error:
            self._channel.send(error_to_record(record.call, error))
        else:
            self._channel.send(Ok(call=record.call))

    def _answer(self, record: Any) -> None:
        self._channel.send(record)
