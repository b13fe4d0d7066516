"""The processes of the fault trials: a real engine's and a real trainer's, in which one fault can be armed.

    engine    headrace.engine.serve, as a run starts it, over a small random model
    trainer   headrace.training.remote's server with the real sender; its weights, or its adapter's over weights
              that stay, are a function of the version

A fault strikes its own process at a named point, once:

    engine    announce.enter, announce.leave, transfer.chunk, transfer.leave, verify.enter, verify.leave,
              swap.enter, swap.flipped (new weights, old version number), acknowledge (swapped, not said yet)
    trainer   announce.enter, announce.leave, transfer.bucket, transfer.leave (all copied, no checksums yet),
              verify.enter (the seal is made, not told yet)

Nothing but these hooks differs from what a run executes.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from fault_weights import ADAPTER, adapter, bits, weights
from torch import Tensor

from headrace.engine import serve
from headrace.engine.messages import Swapped
from headrace.engine.native.core import NativeEngine
from headrace.records import Record, message
from headrace.sync import open_sender
from headrace.sync.base import Stream
from headrace.sync.payload import full, packer
from headrace.sync.receiver import Receiver
from headrace.sync.sender import Sender
from headrace.sync.transport import files, http, relay, shared_memory
from headrace.training.remote import TrainerServer

# Small pieces, so that a small model arrives in a hundred of them.
CHUNK_BYTES, BUCKET_BYTES = 4 << 10, 16 << 10


# ── What the trials ask the processes ────────────────────────────────────────────────────────────────────


class Fault(Record):
    """Strikes at `point`; within a transfer, once `moment` of its bytes (0 to 1) have passed."""

    point: str
    action: str
    """kill, stop, flip, truncate, zero (of the end), full (no room for a version), unsynced (none on the disk)."""
    moment: float = 0.0
    place: float = 0.0
    """Which byte is flipped, or where the end begins: from 0 to 1."""
    times: int = 1
    """How often there is no room, or a connection is cut."""


@message
class Arm(Record):
    call: int
    fault: Fault | None


@message
class AskTruth(Record):
    call: int


@message
class TellTruth(Record):
    """What an engine claims to serve, and the digests of the parameters that its passes read, an adapter's last. Of
    all processes: how many faults have struck."""

    call: int
    struck: int
    version: int = -1
    digests: tuple[int, ...] = ()


class Injector:
    """One fault at a time."""

    def __init__(self) -> None:
        self._fault: Fault | None = None
        self.struck = 0

    def arm(self, fault: Fault | None) -> None:
        self._fault = fault

    def reach(self, point: str, progress: float = 1.0) -> Fault | None:
        """The fault that is due here, if it is one that the caller is to bring about."""
        fault = self._fault
        if fault is None or fault.point != point or progress < fault.moment:
            return None
        self._fault = None
        self.struck += 1
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action == "stop":
            # This thread stops here; a signal for the process might reach another one first.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return fault


def _flip(memory: Tensor, place: float) -> None:
    if len(memory):
        at = min(int(place * len(memory)), len(memory) - 1)
        memory[at] ^= 1 << int(8 * (place * len(memory) % 1))


def _around(thing: Any, name: str, before: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> None:
    """Call these before and after the method of this name."""
    inner = getattr(thing, name)

    def outer(*args: Any, **named: Any) -> Any:
        before()
        result = inner(*args, **named)
        after()
        return result

    setattr(thing, name, outer)


# ── The engine's process ─────────────────────────────────────────────────────────────────────────────────


def engine(sock: socket.socket, descriptors: dict[str, Any], options: dict[str, Any], log: str) -> None:
    """The process's entry."""
    _prepare(options, descriptors, log)
    serve.EngineServer = _Server  # type: ignore[misc]
    serve.start(sock, options)


class _Server(serve.EngineServer):
    def __init__(self, sock: socket.socket, engine: NativeEngine, receiver: Receiver):
        self._injector = injector = Injector()
        reach = injector.reach
        receiver._inlet = _Inlet(receiver._inlet, injector)
        _around(receiver, "check", lambda: reach("announce.enter"), lambda: reach("announce.leave"))
        _around(receiver, "receive", lambda: None, lambda: reach("transfer.leave"))
        _around(receiver, "verify", lambda: reach("verify.enter"), lambda: reach("verify.leave"))
        served, bank = engine._served, engine._served.adapters
        _around(engine, "swap" if bank is None else "swap_adapter", lambda: reach("swap.enter"))
        flipping = (served, "flip") if bank is None else (bank, "take")
        _around(*flipping, lambda: None, lambda: reach("swap.flipped"))
        super().__init__(sock, engine, receiver)
        send = self._channel.send

        def say(*messages: Any) -> None:
            if any(isinstance(message, Swapped) for message in messages):
                reach("acknowledge")
            send(*messages)

        self._channel.send = say  # type: ignore[method-assign]

    def _handle(self, record: Any) -> bool:
        if isinstance(record, Arm):
            self._injector.arm(record.fault)
        if isinstance(record, Arm | AskTruth):
            version, found = self._truth()
            told = TellTruth(call=record.call, struck=self._injector.struck, version=version, digests=found)
            self._channel.send(told)
            return True
        return super()._handle(record)

    def _truth(self) -> tuple[int, tuple[int, ...]]:
        engine = self._engine
        found = bits(engine.live())
        if engine._served.adapters is None:
            return engine.version, found
        for name in engine.adapters:
            found += bits(engine.live(name))
        return engine.adapters.get(ADAPTER.name, -1), found


class _Inlet:
    """Damages what arrives: a bit of a chunk, or the end of the stream."""

    def __init__(self, inner: Any, injector: Injector):
        self._inner = inner
        self._injector = injector

    def chunks(self, stream: Stream, deadline: Any, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        for offset, chunk in self._inner.chunks(stream, deadline, into):
            fault = self._injector.reach("transfer.chunk", (offset + len(chunk)) / max(1, stream.nbytes))
            if fault is not None and fault.action == "truncate":
                yield offset, chunk[: int(fault.place * len(chunk))]
                return
            if fault is not None and fault.action == "flip":
                chunk = chunk.clone()
                _flip(chunk, fault.place)
            yield offset, chunk

    def close(self) -> None:
        self._inner.close()


# ── The trainer's process ────────────────────────────────────────────────────────────────────────────────


def trainer(sock: socket.socket, descriptors: dict[str, Any], options: dict[str, Any], log: str) -> None:
    """The process's entry."""
    _prepare(options, descriptors, log)
    injector = Injector()
    sender = open_sender(options["channel"], **options["sender"])
    sender._outlet = outlet = _Outlet(sender._outlet, injector)
    _damage_what_is_stored(sender, outlet, injector)
    stand_in = _StandIn(options["sender"]["payload"], torch.device(options["device"]))
    _TrainerServer(sock, stand_in, sender, injector).serve()


class _StandIn:
    """A trainer whose step is: other weights, under the next number."""

    between = False
    vocabulary = 1

    def __init__(self, payload: str, device: torch.device):
        self.adapter, self._of = (ADAPTER, adapter) if payload == "adapter" else (None, weights)
        self._at_rest = threading.Lock()
        self._version = 0
        self._device = device
        self._weights = {name: tensor.to(device) for name, tensor in self._of(0).items()}

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, number: int) -> None:
        with self._at_rest:
            for name, tensor in self._of(number).items():
                self._weights[name].copy_(tensor)
            self._version = number

    @contextmanager
    def weights_at_rest(self) -> Iterator[None]:
        with self._at_rest:
            yield

    def side_stream(self) -> Any:
        cuda = self._device.type == "cuda"
        return torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        return self._weights


class _TrainerServer(TrainerServer):
    def __init__(self, sock: socket.socket, trainer: Any, sender: Sender, injector: Injector):
        self._injector = injector
        super().__init__(sock, trainer, sender)

    def _answer(self, record: Any) -> Any:
        if isinstance(record, Arm):
            self._injector.arm(record.fault)
        if isinstance(record, Arm | AskTruth):
            return TellTruth(call=record.call, struck=self._injector.struck)
        return super()._answer(record)


class _Outlet:
    """Knows the memory of the stream on offer, and may keep how much of it is there to itself for a while."""

    def __init__(self, inner: Any, injector: Injector):
        self._inner = inner
        self._injector = injector
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.silent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, *args: Any) -> Tensor:
        self.memory = self._inner.open(*args)
        return self.memory

    def advance(self, filled: int) -> None:
        if not self.silent:
            self._inner.advance(filled)
            self._injector.reach("transfer.bucket", filled / max(1, len(self.memory)))
            if filled == len(self.memory):
                self._injector.reach("transfer.leave")


def _damage_what_is_stored(sender: Sender, outlet: _Outlet, injector: Injector) -> None:
    """After its checksums were made and before receivers hear of it, so that all of them get it damaged."""
    stage, pack = sender.stage, sender.pack

    def staging(*args: Any, **named: Any) -> Any:
        fault = injector.reach("announce.enter")
        if fault is not None and fault.action in ("full", "unsynced"):
            _fill_up(outlet._inner, fault)
        manifest = stage(*args, **named)
        injector.reach("announce.leave")
        return manifest

    def packing() -> Any:
        fault = injector.reach("stored")
        outlet.silent = fault is not None
        seal = pack()
        outlet.silent = False
        if fault is not None:
            _damage(outlet, fault)
        injector.reach("verify.enter")
        return seal

    sender.stage, sender.pack = staging, packing  # type: ignore[method-assign]


def _damage(outlet: _Outlet, fault: Fault) -> None:
    memory, inner = outlet.memory, outlet._inner
    rest = int(fault.place * len(memory))
    if fault.action == "flip":
        _flip(memory, fault.place)
    elif fault.action == "zero":
        memory[rest:] = 0
    if fault.action != "truncate":
        inner.advance(len(memory))
    elif isinstance(inner, files.FilesOutlet):
        inner.advance(len(memory))
        inner._finishing.result()
        place = inner.location()
        os.truncate(Path(place["path"], place["file"]), place["start"] + rest)
    elif isinstance(inner, http.HttpOutlet):
        _cut_connections(fault)
        inner.advance(len(memory))
    else:
        inner.advance(rest)


def _cut_connections(fault: Fault) -> None:
    """The next answers end before they are whole."""
    real, left = http._Served._send, fault.times

    def send(self: Any, name: str, view: memoryview, first: int) -> None:
        nonlocal left
        if left <= 0:
            return real(self, name, view, first)
        left -= 1
        self._connection.sendall(view[first : first + int(fault.place * (len(view) - first))])
        self._closing = True

    http._Served._send = send  # type: ignore[method-assign]


def _fill_up(outlet: Any, fault: Fault) -> None:
    """The disk is full the next times that somebody reserves room, or wants to have something on it."""
    if isinstance(outlet, shared_memory.SharedMemoryOutlet):
        # So that it has to grow again.
        os.ftruncate(outlet._segment._descriptor, shared_memory._HEADER_BYTES)
        outlet._segment._map = None
    name = "posix_fallocate" if fault.action == "full" else "fsync"
    real, left = getattr(os, name), fault.times

    def refuse(*args: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    setattr(os, name, refuse)


def _prepare(options: dict[str, Any], descriptors: dict[str, Any], log: str) -> None:
    """What orchestration's child does, for a process that was forked from a warm one."""
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # Descriptors arrive under numbers of their own.
    options["channel"] |= {key: duplicate.detach() for key, duplicate in descriptors.items()}
    full.BUCKET_BYTES = packer.BUCKET_BYTES = http.RANGE_BYTES = BUCKET_BYTES
    for transport in (shared_memory, relay, files, http):
        transport.CHUNK_BYTES = CHUNK_BYTES  # type: ignore[attr-defined]
    http.SLICE_BYTES = CHUNK_BYTES
