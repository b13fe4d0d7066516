"""What the trainer's end does when the version that it offers is damaged, or lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion
from headrace.sync.base import Destination, Manifest, Seal
from headrace.sync.receiver import Receiver
from headrace.sync.sender import Sender
from headrace.sync.transport.files import FilesInlet, FilesOutlet
from headrace.sync.transport.shared_memory import SharedMemoryInlet, SharedMemoryOutlet, create_segment
from headrace.testing.transport import nudged, weights

V1, V2, V3 = (WeightVersion(number=n, parent=n - 1, step=n) for n in (1, 2, 3))


def has(version: int) -> list[Destination]:
    return [Destination(name="engine-0", version=version)]


def standby(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in like.items()}


def taken(receiver: Receiver, manifest: Manifest, seal: Seal) -> dict[str, torch.Tensor]:
    buffers = standby(weights(1))
    receiver.receive(manifest, buffers)
    receiver.verify(manifest, seal, buffers)
    return buffers


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {name: torch.equal(found[name], tensor) for name, tensor in wanted.items()} == dict.fromkeys(
        wanted, True
    )


@pytest.fixture
def segment() -> Iterator[int]:
    made = create_segment()
    yield made
    os.close(made)


def flip(descriptor: int, place: int) -> None:
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 0x10]), place)


def test_a_version_that_was_damaged_is_not_offered_again_and_can_be_staged_anew(segment: int) -> None:
    sender, receiver = Sender(SharedMemoryOutlet(segment)), Receiver(SharedMemoryInlet(segment))
    sender.send(V1, weights(1), to=has(0))
    flip(segment, 64 + 3)
    with pytest.raises(SyncError, match="the bytes of version 1 were damaged where they lie"):
        sender.again(1, has(0))
    assert_same(taken(receiver, *sender.send(V1, weights(1), to=has(0))), weights(1))
    assert_same(taken(receiver, *sender.again(1, has(0))), weights(1))


def test_a_version_that_was_damaged_is_offered_again_from_the_image_that_is_held(segment: int) -> None:
    sender = Sender(SharedMemoryOutlet(segment), payload="delta")
    receiver = Receiver(SharedMemoryInlet(segment))
    sender.send(V1, weights(1), to=has(0))
    flip(segment, 64 + 3)
    assert_same(taken(receiver, *sender.again(1, has(0))), weights(1))


def test_a_version_that_is_staged_anew_is_offered_whole(segment: int) -> None:
    sender = Sender(SharedMemoryOutlet(segment), payload="delta")
    receiver = Receiver(SharedMemoryInlet(segment))
    sender.send(V1, weights(1), to=has(0))
    for _ in range(2):
        manifest, seal = sender.send(V2, nudged(weights(1), 2), to=has(1))
    assert [stream.base for stream in manifest.streams] == [None]
    assert_same(taken(receiver, manifest, seal), nudged(weights(1), 2))


def test_a_file_that_was_cut_is_an_error_and_no_signal(tmp_path: Path) -> None:
    sender = Sender(FilesOutlet(str(tmp_path), "0123abcd"))
    manifest, seal = sender.send(V1, weights(1), to=has(0))
    assert_same(taken(Receiver(FilesInlet()), manifest, seal), weights(1))
    place = manifest.streams[-1].location
    os.truncate(Path(place["path"], place["file"]), place["start"] + 5)
    with pytest.raises(SyncError, match=r"has \d+ bytes of \d+; somebody cut it"):
        sender.again(1, has(0))


def test_a_version_that_did_not_come_to_the_disk_is_not_built_upon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(FilesOutlet(str(tmp_path), "0123abcd"), payload="delta")
    tensors = [weights(1), nudged(weights(1), 2), nudged(weights(1), 3)]
    sender.send(V1, tensors[0], to=has(0))
    sender.again(1, has(0))
    synchronise = os.fsync

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sender.stage(V2, tensors[1], to=has(1))
    monkeypatch.setattr(os, "fsync", refuse)
    sender.pack()
    with pytest.raises(SyncError, match="No space left on device"):
        sender.again(2, has(1))
    monkeypatch.setattr(os, "fsync", synchronise)
    manifest, seal = sender.send(V3, tensors[2], to=has(1))
    assert [stream.base for stream in manifest.streams] == [None]
    assert_same(taken(Receiver(FilesInlet()), manifest, seal), tensors[2])
