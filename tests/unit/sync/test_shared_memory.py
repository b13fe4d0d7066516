"""What is particular to shared memory. What every transport does is in tests/contract."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion, encode
from headrace.sync.receiver import Receiver
from headrace.sync.sender import Sender
from headrace.sync.transport.shared_memory import Segment, SharedMemoryInlet, SharedMemoryOutlet, create_segment
from headrace.testing.transport import weights

V1 = WeightVersion(number=1, parent=0, step=1)
V2 = WeightVersion(number=2, parent=1, step=2)


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_segment()
    yield made
    os.close(made)


def standby() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in weights(0).items()}


def test_bytes_that_change_on_the_way_are_caught_by_verify(descriptor: int) -> None:
    manifest, seal = Sender(SharedMemoryOutlet(descriptor)).send(V1, weights(0))
    place = 64 + next(spec.offset for spec in manifest.tensors if spec.name == "halves")
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, place)[0] ^ 0x10]), place)
    receiver, buffers = Receiver(SharedMemoryInlet(descriptor)), standby()
    receiver.receive(manifest, buffers)
    with pytest.raises(SyncError, match=r"checksums differ for halves;"):
        receiver.verify(manifest, seal, buffers)


def test_a_stream_that_is_replaced_while_it_is_read_is_refused(descriptor: int) -> None:
    sender, inlet = Sender(SharedMemoryOutlet(descriptor)), SharedMemoryInlet(descriptor)
    manifest, _ = sender.send(V1, weights(0))

    class Replacing:
        def chunks(self, *arguments):
            for chunk in inlet.chunks(*arguments):
                yield chunk
                sender.send(V2, weights(1))

    with pytest.raises(SyncError, match="version 1 was replaced by a later one"):
        Receiver(Replacing()).receive(manifest, standby())  # type: ignore[arg-type]


def test_a_reader_never_sees_a_header_that_is_half_written(descriptor: int) -> None:
    segment = Segment(descriptor)
    segment.tell(7, 1)
    code = (
        "from headrace.sync.transport.shared_memory import Segment\n"
        f"segment, filled = Segment({descriptor}), 1\n"
        "while True:\n"
        "    filled += 1; segment.tell(7, filled)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], pass_fds=[descriptor])
    try:
        while segment.told()[1] == 1 and writer.poll() is None:
            pass
        told = [segment.told() for _ in range(200_000)]
    finally:
        writer.kill()
        writer.wait(30)
    assert {generation for generation, _ in told} == {7}
    filled = [filled for _, filled in told]
    assert filled == sorted(filled)
    assert filled[0] < filled[-1]


def test_a_segment_shorter_than_announced_is_an_error_not_a_crash(descriptor: int) -> None:
    manifest, _ = Sender(SharedMemoryOutlet(descriptor)).send(V1, weights(0))
    os.ftruncate(descriptor, 100)
    with pytest.raises(SyncError, match="100 bytes"):
        Receiver(SharedMemoryInlet(descriptor)).receive(manifest, standby())


def test_a_sender_that_takes_anothers_place_counts_on(descriptor: int) -> None:
    old, _ = Sender(SharedMemoryOutlet(descriptor)).send(V1, weights(1))
    new, seal = Sender(SharedMemoryOutlet(descriptor)).send(V2, weights(2))
    assert (old.streams[0].location, new.streams[0].location) == ({"generation": 1}, {"generation": 2})
    receiver, buffers = Receiver(SharedMemoryInlet(descriptor)), standby()
    with pytest.raises(SyncError, match="version 1 was replaced"):
        receiver.receive(old, buffers)
    receiver.receive(new, buffers)
    receiver.verify(new, seal, buffers)


def test_no_room_for_the_segment_is_an_error_not_a_signal(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SyncError, match=r"no room for \d+ bytes of weights: .*No space left") as caught:
        Sender(SharedMemoryOutlet(descriptor)).send(V1, weights(0))
    assert caught.value.stage == "announce"


def test_without_anonymous_memory_an_unlinked_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = create_segment()
    manifest, seal = Sender(SharedMemoryOutlet(descriptor)).send(V1, weights(0))
    receiver, buffers = Receiver(SharedMemoryInlet(descriptor)), standby()
    receiver.receive(manifest, buffers)
    receiver.verify(manifest, seal, buffers)
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


ENGINE = """
import sys, torch
from headrace.records import decode
from headrace.sync import open_receiver

receiver = open_receiver({"transport": "shared_memory", "descriptor": int(sys.argv[1])})
for _ in range(2):
    read = sys.stdin.buffer.read
    manifest, seal = (decode(read(int.from_bytes(read(8), "little"))) for _ in range(2))
    standby = {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in manifest.tensors}
    receiver.check(manifest, standby)
    receiver.receive(manifest, standby)
    receiver.verify(manifest, seal, standby)
    total = sum(float(t.double().sum()) for t in sorted(standby.values(), key=lambda t: t.numel()))
    print(manifest.version.number, repr(total), flush=True)
"""


def test_two_processes_share_a_segment_that_grows_between_versions(descriptor: int) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(descriptor)],
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    sender = Sender(SharedMemoryOutlet(descriptor), dtype=torch.bfloat16)
    for version, rows in ((V1, 7), (V2, 3000)):
        tensors = weights(version.number, rows)
        for message in map(encode, sender.send(version, tensors)):
            engine.stdin.write(len(message).to_bytes(8, "little") + message)
        engine.stdin.flush()
        published = [t.to(torch.bfloat16) if t.is_floating_point() else t for t in tensors.values()]
        total = sum(float(t.double().sum()) for t in published)
        number, found = engine.stdout.readline().decode().split()
        assert int(number) == version.number
        assert float(found) == pytest.approx(total, rel=1e-12)
    assert engine.wait(timeout=60) == 0
    engine.stdin.close()
    engine.stdout.close()
