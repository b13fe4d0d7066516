"""The transport `collective` as far as one GPU shows it: NCCL with one rank, and sockets to and from a device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from headrace.records import WeightVersion
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.receiver import Receiver
from headrace.sync.sender import Sender
from headrace.sync.transport import open_channel, open_inlet, open_outlet, process_group
from headrace.sync.transport.collective import (
    AT_ONCE,
    CollectiveInlet,
    CollectiveOutlet,
    Location,
    _Offer,
    _SendingGroup,
    cuts,
)
from headrace.sync.transport.handshake import make_secret
from headrace.sync.transport.meeting import Meetings
from headrace.sync.transport.process_group import NcclGroup

pytestmark = pytest.mark.gpu

BUCKET = 1 << 20
NBYTES = 10 * BUCKET + 12345


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def meetings() -> Iterator[Meetings]:
    made = Meetings("127.0.0.1", make_secret())
    yield made
    made.close()


@pytest.fixture
def group(device: torch.device) -> Iterator[NcclGroup]:
    made = NcclGroup(0, 1, [], device=device)
    yield made
    made.abort()


def _content(device: torch.device) -> torch.Tensor:
    return (torch.arange(NBYTES, device=device) % 251).to(torch.uint8)


def test_buckets_broadcast_to_oneself_are_as_they_were(group: NcclGroup, device: torch.device) -> None:
    memory = _content(device)
    torch.cuda.synchronize(device)
    for first in range(0, NBYTES, BUCKET):
        if group.in_flight == AT_ONCE:
            group.finish(20.0)
        group.begin(memory[first : first + BUCKET], 20.0)
    while group.in_flight:
        group.finish(20.0)
    assert torch.equal(memory, _content(device))


def test_a_sender_does_not_wait_for_what_the_default_stream_still_does(
    group: NcclGroup, device: torch.device
) -> None:
    memory = _content(device)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(4_000_000_000)
    began = time.monotonic()
    with process_group.on_own_stream(device):
        group.begin(memory, 20.0)
        group.finish(20.0)
    assert time.monotonic() - began < 0.5
    torch.cuda.synchronize(device)


def test_an_aborted_group_takes_nothing_more_and_does_not_hang(group: NcclGroup, device: torch.device) -> None:
    memory = _content(device)
    group.begin(memory, 20.0)
    began = time.monotonic()
    group.abort()
    assert time.monotonic() - began < 5.0
    with pytest.raises(RuntimeError, match="abandoned"):
        group.begin(memory, 20.0)
    with pytest.raises(RuntimeError):
        group.finish(20.0)


def test_a_group_leaves_the_environment_alone(group: NcclGroup) -> None:
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_the_sending_thread_follows_the_watermark_on_the_device(meetings: Meetings, device: torch.device) -> None:
    sending = _SendingGroup(
        number=2,
        members=(),
        backend="nccl",
        device=device,
        meetings=meetings,
        seconds=20.0,
    )
    memory = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    for number in (1, 2):
        sending.offer(_Offer(_location(10 * number), number, memory, 0))
        for filled in (NBYTES // 3, NBYTES):
            memory[:filled] = _content(device)[:filled]
            torch.cuda.synchronize(device)
            sending.advance(filled)
        end = time.monotonic() + 20
        while not sending.rests():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert torch.equal(memory, _content(device))
    sending.abandon()
    sending.join(20.0)
    assert not sending._thread.is_alive()


def test_an_inlet_receives_into_device_memory_bucket_by_bucket(group: NcclGroup, device: torch.device) -> None:
    """Rank 0 receives what it sends: the walk through the buckets, not their way."""
    location = _location(2)
    memory = _content(device)
    inlet, deadline = CollectiveInlet("engine-0", make_secret()), Deadline(20, "engine-0", "version 1")
    chunks = list(inlet._buckets(group, location, NBYTES, memory, deadline))
    assert [offset for offset, _ in chunks] == [first for first, _ in cuts(NBYTES, location)]
    assert torch.equal(torch.cat([chunk for _, chunk in chunks]), _content(device))
    in_turn = [chunk.data_ptr() for _, chunk in inlet._buckets(group, location, NBYTES, None, deadline)]
    assert len(set(in_turn)) == AT_ONCE


def test_the_backend_follows_the_device_unless_told(device: torch.device) -> None:
    draft = Manifest(
        version=WeightVersion(number=1, parent=0, step=1),
        payload="full",
        transport="collective",
        tensors=(),
        nbytes=NBYTES,
        streams=(Stream(number=1, nbytes=NBYTES),),
    )
    for options, found in (({}, ("nccl", "cuda")), ({"backend": "sockets"}, ("sockets", "cpu"))):
        outlet = CollectiveOutlet(make_secret(), **options)
        memory = outlet.open(draft, [], device)
        assert (outlet.location()["backend"], memory.device.type) == found
        assert outlet.open(draft, [], torch.device("cpu")).device.type == "cpu"
        outlet.close()


def test_weights_go_from_a_gpu_to_a_gpu_through_sockets(device: torch.device) -> None:
    channel = open_channel("collective", backend="sockets", bucket_bytes=1 << 16)
    sender, receiver = Sender(open_outlet(channel), dtype=torch.bfloat16), Receiver(open_inlet(channel, "engine-0"))
    for number in (1, 2, 3):
        draw = torch.Generator(device).manual_seed(number)
        tensors = {name: torch.randn(700, 300, device=device, generator=draw) for name in "abc"}
        standby = {name: torch.zeros(700, 300, device=device, dtype=torch.bfloat16) for name in "abc"}
        version = WeightVersion(number=number, parent=number - 1, step=number)
        manifest, seal = sender.send(version, tensors, to=[Destination(name="engine-0", version=0)])
        receiver.receive(manifest, standby)
        receiver.verify(manifest, seal, standby)
        assert all(torch.equal(standby[name], tensors[name].to(torch.bfloat16)) for name in "abc")
    receiver.close()
    sender.close()
    os.close(channel["descriptor"])


def _location(generation: int) -> Location:
    return Location(
        host="127.0.0.1",
        port=1,
        group=1,
        generation=generation,
        ranks={"engine-0": 1},
        leaders={"engine-0": "engine-0"},
        backend="nccl",
        bucket_bytes=BUCKET,
        smallest_bytes=BUCKET // 4,
        lanes=1,
    )
