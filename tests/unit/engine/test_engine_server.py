"""The engine's process, its channel's other end in this one: stages of a publication that overlap other things."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import torch
from engine_builders import make_engine, request, version_of

from headrace import records
from headrace.engine import messages
from headrace.engine.native import NativeEngine
from headrace.engine.serve import EngineServer
from headrace.errors import SyncError
from headrace.ipc import FrameReader, Stop
from headrace.records import WeightVersion
from headrace.sync.base import Manifest, Seal
from headrace.sync.digest import digests

OPEN: list[socket.socket] = []


class Copies:
    """A receiver that brings the announced version's weights."""

    def check(self, manifest: Manifest, standby: Any, *, has: int) -> None: ...

    def verify(self, manifest: Manifest, seal: Seal, standby: Any) -> None:
        if digests([standby[name] for name in sorted(standby)]) != list(seal.checksums):
            raise SyncError("verify", "engine", "checksums differ")

    def receive(self, manifest: Manifest, standby: Any, **rest: Any) -> None:
        weights = dict(version_of(manifest.version.number).named_parameters())
        for name, buffer in standby.items():
            buffer.copy_(weights[name].detach())

    def look(self, manifest: Manifest, standby: Any) -> None: ...

    def forget(self) -> None: ...


def manifest_of(number: int) -> Manifest:
    version = WeightVersion(number=number, parent=None, step=0)
    return Manifest(version=version, payload="full", transport="test", tensors=(), nbytes=0, streams=())


def seal_of(number: int) -> Seal:
    weights = [weight.detach() for _, weight in sorted(version_of(number).named_parameters())]
    return Seal(number=number, checksums=tuple(digests(weights)))


class Client:
    def __init__(self, engine: NativeEngine):
        self._sock, theirs = socket.socketpair()
        self._calls, self._reader = 0, FrameReader()
        self._answers: dict[int, Any] = {}
        self._arrived = threading.Condition()
        server = EngineServer(theirs, engine, Copies())
        self._threads = [threading.Thread(target=run, daemon=True) for run in (server.serve, self._read)]
        for thread in self._threads:
            thread.start()

    def tell(self, kind: Any, **fields: Any) -> int:
        self._calls += 1
        self._sock.sendall(records.encode(kind(call=self._calls, **fields)))
        return self._calls

    def answer(self, call: int) -> Any:
        with self._arrived:
            assert self._arrived.wait_for(lambda: call in self._answers, timeout=30)
            return self._answers[call]

    def ask(self, kind: Any, **fields: Any) -> Any:
        return self.answer(self.tell(kind, **fields))

    def close(self) -> None:
        self._sock.sendall(records.encode(Stop()))
        self._threads[0].join(30)
        # A child whose controller's socket closes ends its process at once, and that would be this one.
        OPEN.append(self._sock)

    def _read(self) -> None:
        try:
            while data := self._sock.recv(1 << 20):
                with self._arrived:
                    self._answers |= {record.call: record for record in self._reader.feed(data)}
                    self._arrived.notify_all()
        except OSError:
            pass


def serves(engine: NativeEngine, number: int) -> bool:
    live = dict(engine._model.named_parameters())
    return all(torch.equal(live[name], weight) for name, weight in version_of(number).named_parameters())


def test_a_version_that_arrives_during_a_swap_does_not_become_the_one_that_is_swapped_in():
    engine = make_engine()
    inside, swap = threading.Event(), engine.swap

    def slow_swap(*arguments: Any) -> Any:
        inside.set()
        time.sleep(0.3)
        return swap(*arguments)

    engine.swap = slow_swap  # type: ignore[method-assign]
    client = Client(engine)
    client.tell(messages.Announce, manifest=manifest_of(1))
    client.tell(messages.Transfer, number=1)
    assert isinstance(client.ask(messages.Verify, seal=seal_of(1)), messages.Ok)
    client.tell(messages.Sample, request=request(0, range(5), 40))
    # The publisher gave up on this swap and goes on with the next version.
    swapped = client.tell(messages.Swap, number=1, interrupt="keep")
    assert inside.wait(10)
    announced = client.tell(messages.Announce, manifest=manifest_of(2))
    transferred = client.tell(messages.Transfer, number=2)
    assert isinstance(client.answer(swapped), messages.Swapped)
    assert serves(engine, 1)
    assert isinstance(client.answer(announced), messages.Ok)
    assert isinstance(client.answer(transferred), messages.Ok)
    assert isinstance(client.ask(messages.Verify, seal=seal_of(2)), messages.Ok)
    assert isinstance(client.ask(messages.Swap, number=2, interrupt="keep"), messages.Swapped)
    assert serves(engine, 2)
    client.close()


def test_a_transfer_that_was_not_announced_does_not_bring_a_sleeping_engines_memory_back():
    engine = make_engine()
    client = Client(engine)
    assert isinstance(client.ask(messages.Announce, manifest=manifest_of(1)), messages.Ok)
    assert isinstance(client.ask(messages.Sleep, keep_weights=False), messages.Ok)
    assert not isinstance(client.ask(messages.Transfer, number=1), messages.Ok)
    assert not any(block.resident for block in engine._served.base._blocks)
    client.close()
