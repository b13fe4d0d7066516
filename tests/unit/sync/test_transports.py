from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion, decode, encode
from headrace.sync.digest import digests
from headrace.sync.manifest import check_manifest, verify
from headrace.sync.payload import full
from headrace.sync.transport import create_segment, open_channel, open_receiver, open_sender, shared_memory

V1 = WeightVersion(number=1, parent=0, step=1)
V2 = WeightVersion(number=2, parent=1, step=2)


def weights(seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7 * scale, 5, generator=draw),
        "bias": torch.randn(3, generator=draw),
        "scalar": torch.randn((), generator=draw),
        "transposed": torch.randn(4, 6, generator=draw).t(),
        "counts": torch.arange(9, dtype=torch.int64),
    }


def standby_for(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(t.shape, dtype=dtype if dtype and t.is_floating_point() else t.dtype)
        for name, t in tensors.items()
    }


@pytest.fixture(params=["in_process", "shared_memory"])
def channel(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    made = open_channel(request.param)
    yield made
    if "descriptor" in made:
        os.close(made["descriptor"])


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_every_bit_arrives_in_the_published_dtype(channel: dict[str, Any], dtype: str | None) -> None:
    channel["dtype"] = dtype
    sender, receiver = open_sender(channel), open_receiver(channel)
    published = getattr(torch, dtype) if dtype else None
    for version, seed in ((V1, 1), (V2, 2)):
        tensors = weights(seed)
        standby = standby_for(tensors, published)
        manifest = decode(encode(sender.send(version, tensors)))
        check_manifest(manifest, standby)
        receiver.receive(manifest, standby)
        verify(manifest, standby)
        assert manifest.version.number == version.number
        for name, tensor in tensors.items():
            assert torch.equal(standby[name], tensor.to(standby[name].dtype)), name
    receiver.close()
    sender.close()


def test_what_is_sent_is_a_copy_that_later_training_does_not_touch(channel: dict[str, Any]) -> None:
    tensors = weights(0)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    manifest = open_sender(channel).send(V1, tensors)
    for tensor in tensors.values():
        tensor.zero_()
    standby = standby_for(tensors)
    open_receiver(channel).receive(manifest, standby)
    assert all(torch.equal(standby[name], tensor) for name, tensor in expected.items())


def test_several_receivers_read_one_version(channel: dict[str, Any]) -> None:
    tensors = weights(0)
    manifest = open_sender(channel).send(V1, tensors)
    for _ in range(3):
        standby = standby_for(tensors)
        open_receiver(channel).receive(manifest, standby)
        verify(manifest, standby)


def test_a_larger_version_grows_the_room_it_is_sent_in(channel: dict[str, Any]) -> None:
    sender, receiver = open_sender(channel), open_receiver(channel)
    for version, scale in ((V1, 1), (V2, 5000)):
        tensors = weights(0, scale)
        standby = standby_for(tensors)
        manifest = sender.send(version, tensors)
        receiver.receive(manifest, standby)
        assert all(torch.equal(standby[name], tensor) for name, tensor in tensors.items())


def test_a_version_that_a_later_one_replaced_is_not_received(channel: dict[str, Any]) -> None:
    sender, receiver = open_sender(channel), open_receiver(channel)
    tensors = weights(0)
    old = sender.send(V1, tensors)
    sender.send(V2, weights(1))
    standby = standby_for(tensors)
    with pytest.raises(SyncError, match="version 1") as caught:
        receiver.receive(old, standby)
    assert caught.value.stage == "transfer"
    assert not any(tensor.any() for tensor in standby.values())


def test_a_corrupted_byte_is_caught_by_verify(channel: dict[str, Any]) -> None:
    tensors = weights(0)
    manifest = open_sender(channel).send(V1, tensors)
    standby = standby_for(tensors)
    open_receiver(channel).receive(manifest, standby)
    standby["embed"].view(torch.uint8)[3, 2] ^= 1
    with pytest.raises(SyncError, match="embed") as caught:
        verify(manifest, standby, who="engine-7")
    assert (caught.value.stage, caught.value.who) == ("verify", "engine-7")
    assert "bias" not in str(caught.value)


def test_bytes_that_change_on_the_way_are_caught_by_verify() -> None:
    descriptor = create_segment()
    tensors = weights(0)
    manifest = shared_memory.SharedMemorySender(descriptor).send(V1, tensors)
    place = 64 + next(spec.offset for spec in manifest.tensors if spec.name == "bias")
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 0x10]), place)
    standby = standby_for(tensors)
    shared_memory.SharedMemoryReceiver(descriptor).receive(manifest, standby)
    with pytest.raises(SyncError, match="bias"):
        verify(manifest, standby)
    os.close(descriptor)


def test_a_send_under_way_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = create_segment()
    sender, receiver = shared_memory.SharedMemorySender(descriptor), shared_memory.SharedMemoryReceiver(descriptor)
    tensors = weights(0)
    manifest = sender.send(V1, tensors)
    read = full.read

    def read_then_replace(*arguments: Any) -> None:
        read(*arguments)
        sender.send(V2, weights(1))

    monkeypatch.setattr(full, "read", read_then_replace)
    with pytest.raises(SyncError, match="while it was copied"):
        receiver.receive(manifest, standby_for(tensors))
    os.close(descriptor)


def test_a_segment_shorter_than_announced_is_an_error_not_a_crash() -> None:
    descriptor = create_segment()
    tensors = weights(0)
    manifest = shared_memory.SharedMemorySender(descriptor).send(V1, tensors)
    os.ftruncate(descriptor, 100)
    with pytest.raises(SyncError, match="100 bytes"):
        shared_memory.SharedMemoryReceiver(descriptor).receive(manifest, standby_for(tensors))
    os.close(descriptor)


def test_tensors_lie_aligned_and_carry_the_checksum_of_their_published_bytes(channel: dict[str, Any]) -> None:
    channel["dtype"] = "bfloat16"
    tensors = weights(0)
    manifest = open_sender(channel).send(V1, tensors)
    assert [spec.offset for spec in manifest.tensors] == [0, 128, 192, 256, 320]
    assert manifest.nbytes == 448
    published = tensors["transposed"].to(torch.bfloat16)
    spec = {spec.name: spec for spec in manifest.tensors}["transposed"]
    assert (spec.dtype, spec.shape, spec.nbytes) == ("bfloat16", (6, 4), 48)
    assert [spec.checksum] == digests([published])


def test_without_anonymous_memory_an_unlinked_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = create_segment()
    tensors = weights(0)
    manifest = shared_memory.SharedMemorySender(descriptor).send(V1, tensors)
    standby = standby_for(tensors)
    shared_memory.SharedMemoryReceiver(descriptor).receive(manifest, standby)
    assert all(torch.equal(standby[name], tensor) for name, tensor in tensors.items())
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


ENGINE = """
import sys, torch
from headrace.records import decode
from headrace.sync.manifest import check_manifest, verify
from headrace.sync.transport import open_receiver

receiver = open_receiver({"type": "shared_memory", "descriptor": int(sys.argv[1])})
for _ in range(2):
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    manifest = decode(sys.stdin.buffer.read(size))
    standby = {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in manifest.tensors}
    check_manifest(manifest, standby)
    receiver.receive(manifest, standby)
    verify(manifest, standby)
    total = sum(float(t.double().sum()) for t in standby.values())
    print(manifest.version.number, repr(total), flush=True)
"""


def test_two_processes_share_a_segment_that_grows_between_versions() -> None:
    descriptor = create_segment()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    sender = shared_memory.SharedMemorySender(descriptor, torch.bfloat16)
    for version, scale in ((V1, 1), (V2, 300)):
        tensors = weights(version.number, scale)
        message = encode(sender.send(version, tensors))
        engine.stdin.write(len(message).to_bytes(8, "little") + message)
        engine.stdin.flush()
        total = sum(
            float((t.to(torch.bfloat16) if t.is_floating_point() else t).double().sum()) for t in tensors.values()
        )
        assert engine.stdout.readline().decode().strip() == f"{version.number} {total!r}"
    assert engine.wait(timeout=60) == 0
    engine.stdin.close()
    engine.stdout.close()
    os.close(descriptor)
