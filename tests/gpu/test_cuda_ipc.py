"""Weights from process to process on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from gpu_builders import SMALL

from headrace.errors import SyncError
from headrace.models import random_model
from headrace.records import WeightVersion, encode
from headrace.sync.base import Destination, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.digest import digests
from headrace.sync.sender import Sender
from headrace.sync.transport.cuda_ipc import CudaIpcInlet, CudaIpcOutlet
from headrace.sync.transport.shared_memory import create_segment

pytestmark = pytest.mark.gpu

ENGINE = """
import sys, torch
from headrace.errors import HeadraceError
from headrace.records import decode
from headrace.sync.digest import digests
from headrace.sync.payload.full import place
from headrace.sync.receiver import Receiver
from headrace.sync.transport.cuda_ipc import CudaIpcInlet

receiver, live, has = Receiver(CudaIpcInlet(int(sys.argv[1])), deadline_s=10.0), {}, -1
while length := sys.stdin.buffer.read(8):
    manifest, seal = decode(sys.stdin.buffer.read(int.from_bytes(length, "little"))), None
    seal = decode(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little")))
    if sys.argv[2] == "block":
        block = torch.zeros(manifest.nbytes, dtype=torch.uint8, device="cuda")
        standby = {s.name: place(s, block) for s in manifest.tensors}
    else:
        empty = lambda s: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda")
        standby = {s.name: empty(s) for s in manifest.tensors}
    def refresh():
        for name, buffer in standby.items():
            buffer.copy_(live[name])
    try:
        receiver.check(manifest, standby, has=has)
        receiver.receive(manifest, standby, has=has, refresh=refresh)
        receiver.verify(manifest, seal, standby)
        live, has = standby, manifest.version.number
        print("ok", has, *digests([standby[s.name] for s in manifest.tensors]), flush=True)
    except HeadraceError as error:
        print("failed", error, flush=True)
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_segment()
    yield made
    os.close(made)


class Engine:
    def __init__(self, descriptor: int, buffers: str = "apart"):
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(descriptor), buffers],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def take(self, *records) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        for message in map(encode, records):
            self.process.stdin.write(len(message).to_bytes(8, "little") + message)
        self.process.stdin.flush()
        return self.process.stdout.readline().decode().split()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.mark.parametrize("buffers", ["apart", "block"])
@pytest.mark.parametrize("payload", ["full", "delta"])
def test_every_bit_arrives_in_another_process_version_after_version(descriptor: int, payload: str, buffers: str):
    """In one block, they are copied and digested in one pass."""
    sender = Sender(CudaIpcOutlet(descriptor), payload=payload, dtype=torch.bfloat16)
    engine = Engine(descriptor, buffers)
    tensors = {n: p.detach().clone() for n, p in random_model(SMALL, 1, device="cuda").named_parameters()}
    for number in range(1, 6):
        version = WeightVersion(number=number, parent=number - 1, step=number)
        has = number - 1 if number > 1 else -1
        manifest, seal = sender.send(version, tensors, to=[Destination(name="engine", version=has)])
        expected = digests([tensors[spec.name].to(torch.bfloat16) for spec in manifest.tensors])
        assert engine.take(manifest, seal) == ["ok", str(number), *map(str, expected)]
        assert (manifest.streams[-1].base is None) == (payload == "full" or number == 1)
        for tensor in tensors.values():
            tensor += (torch.rand_like(tensor) < 0.02) * 0.01
    engine.close()
    sender.close()


def test_a_version_that_was_replaced_is_refused_and_the_next_one_arrives(descriptor: int):
    sender, engine = Sender(CudaIpcOutlet(descriptor), dtype=torch.bfloat16), Engine(descriptor)
    tensors = {n: p.detach() for n, p in random_model(SMALL, 1, device="cuda").named_parameters()}
    old = sender.send(WeightVersion(number=1, parent=0, step=1), tensors)
    new = sender.send(WeightVersion(number=2, parent=1, step=2), tensors)
    assert "version 1 was replaced by a later one" in " ".join(engine.take(*old))
    assert engine.take(*new)[:2] == ["ok", "2"]
    engine.close()
    sender.close()


def test_a_dead_senders_memory_is_an_error_and_not_a_crash(descriptor: int):
    handle = [0, b"\0" * 66, 1024, 0, b"", 0, b"", False]
    CudaIpcOutlet(descriptor)._told.bytes(0, grow=True)
    stream = Stream(number=1, nbytes=1024, location={"generation": 1, "handle": handle})
    chunks = CudaIpcInlet(descriptor).chunks(stream, Deadline(1.0, "a", "b"), None)
    with pytest.raises(SyncError, match="cannot be mapped"):
        next(chunks)
