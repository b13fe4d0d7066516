"""The transport `collective` where things go wrong: processes that are killed, stopped, late or out of step."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from collective_ends import BUCKET, NBYTES, EngineProcess, begin, checksum, content, start_trainer
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DeadlineExceeded, SyncError
from headrace.records import WeightVersion
from headrace.sync.base import Destination, Inlet, Manifest, Outlet, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN
from headrace.sync.transport import collective, meeting, open_channel, open_inlet, open_outlet, process_group
from headrace.sync.transport.handshake import make_secret
from headrace.sync.transport.meeting import Meetings
from headrace.sync.transport.process_group import SocketGroup

PROMPT_S = 5.0
"""Far below every deadline and timeout of these tests, far above what is done in it."""


@pytest.fixture
def channel() -> Iterator[dict[str, Any]]:
    """Engines on one machine: the first one hands on."""
    channel = open_channel("collective", bucket_bytes=BUCKET)
    yield channel
    os.close(channel["descriptor"])


@pytest.fixture
def apart(channel: dict[str, Any]) -> dict[str, Any]:
    """Engines that share no memory: each is a rank."""
    return {**channel, "descriptor": None}


@pytest.fixture
def outlet_of() -> Iterator[Callable[[dict[str, Any]], Outlet]]:
    opened: list[Outlet] = []

    def make(channel: dict[str, Any]) -> Outlet:
        opened.append(open_outlet(channel))
        return opened[-1]

    yield make
    for outlet in opened:
        outlet.close()


@pytest.fixture
def engine_of() -> Iterator[Callable[..., EngineProcess]]:
    started: list[EngineProcess] = []

    def make(channel: dict[str, Any], name: str, deadline_s: float = 20.0) -> EngineProcess:
        started.append(EngineProcess(channel, name, deadline_s))
        return started[-1]

    yield make
    for engine in started:
        engine.end()


# ── What is killed or stopped ────────────────────────────────────────────────────────────────────────────


def test_a_receiver_killed_in_the_middle_holds_nobody_up_and_the_next_version_reaches_the_others(
    apart, outlet_of, engine_of
):
    outlet = outlet_of(apart)
    dies, lives = engine_of(apart, "dies"), engine_of(apart, "lives")
    # So much is left, more than connections buffer, that the one who lives cannot have got it all before the other
    # is missed.
    stream, fill = begin(outlet, 1, ["dies", "lives"], share=0.02, nbytes=32 << 20)
    for engine in (dies, lives):
        engine.take(stream)
    for engine in (dies, lives):
        engine.expect("has")
    dies.signal(signal.SIGKILL)
    began = time.monotonic()
    fill()
    failed = lives.expect("failed")
    stream, _ = begin(outlet, 2, ["lives"])
    assert time.monotonic() - began < PROMPT_S
    assert failed["failed"] == "SyncError"
    assert "version 1 broke off" in failed["why"]
    lives.take(stream)
    assert lives.expect("took")["took"] == checksum(2)


def test_receivers_of_a_killed_sender_are_told_at_once(apart):
    trainer, stream = start_trainer(apart, ["engine-0"])
    inlet = open_inlet(apart, "engine-0")
    chunks = inlet.chunks(stream, Deadline(30, "engine-0", "version 1"), None)
    taken = _until(chunks, NBYTES // 2)
    trainer.kill()
    trainer.wait()
    began = time.monotonic()
    with pytest.raises(SyncError, match=f"version 1 broke off after {NBYTES // 2} of {NBYTES} bytes"):
        next(chunks)
    assert time.monotonic() - began < PROMPT_S
    assert torch.equal(taken, content(1)[: NBYTES // 2])
    inlet.close()


@pytest.mark.parametrize("joined", [True, False])
def test_receivers_of_a_stopped_sender_end_by_their_deadline(apart, joined):
    trainer, stream = start_trainer(apart, ["engine-0"])
    inlet = open_inlet(apart, "engine-0")
    chunks = inlet.chunks(stream, Deadline(2.0, "engine-0", "version 1"), None)
    if joined:
        _until(chunks, NBYTES // 2)
    os.kill(trainer.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"engine-0 waited 2\.0 s for version 1"):
        next(chunks)
    assert time.monotonic() - began < 2.0 + PROMPT_S
    trainer.kill()
    trainer.wait()
    inlet.close()


def test_a_receiver_stopped_past_its_deadline_gives_up_and_takes_a_later_version(apart, outlet_of, engine_of):
    outlet = outlet_of(apart)
    engine, other = engine_of(apart, "sleeps", 1.5), engine_of(apart, "wakes")
    stream, fill = begin(outlet, 1, ["sleeps"], share=0.5)
    engine.take(stream)
    engine.expect("has")
    engine.signal(signal.SIGSTOP)
    fill()
    time.sleep(2.0)
    began = time.monotonic()
    stream, _ = begin(outlet, 2, ["wakes"])
    other.take(stream)
    assert other.expect("took")["took"] == checksum(2)
    assert time.monotonic() - began < PROMPT_S
    engine.signal(signal.SIGCONT)
    failed = engine.expect("failed")
    assert (failed["failed"], "version 1" in failed["why"]) == ("DeadlineExceeded", True)
    stream, _ = begin(outlet, 3, ["sleeps", "wakes"])
    for one in (engine, other):
        one.take(stream)
    assert [one.expect("took")["took"] for one in (engine, other)] == [checksum(3)] * 2


def test_an_engine_that_was_started_again_is_refused_by_its_old_group_and_welcome_in_the_next(
    apart, outlet_of, engine_of
):
    outlet, engine = outlet_of(apart), engine_of(apart, "engine-0")
    stream, _ = begin(outlet, 1, ["engine-0"])
    engine.take(stream)
    engine.expect("took")
    engine.end()
    again = engine_of(apart, "engine-0")
    stream, _ = begin(outlet, 2, ["engine-0"])
    again.take(stream)
    assert again.expect("failed")["seconds"] < PROMPT_S
    location = outlet.reopen([Destination(name="engine-0", version=0)])
    again.take(Stream(number=2, nbytes=NBYTES, location=location))
    assert again.expect("took")["took"] == checksum(2)


def test_an_engine_that_is_known_to_have_been_started_again_is_met_in_a_new_group(apart, outlet_of, engine_of):
    outlet, engine = outlet_of(apart), engine_of(apart, "engine-0")
    for number in (1, 2):
        stream, _ = begin(outlet, number, ["engine-0"])
        engine.take(stream)
        engine.expect("took")
    engine.end()
    again = engine_of(apart, "engine-0")
    again.take(Stream(number=2, nbytes=NBYTES, location=outlet.reopen([Destination(name="engine-0", version=-1)])))
    assert again.expect("took")["took"] == checksum(2)
    again.end()
    again = engine_of(apart, "engine-0")
    stream, _ = begin(outlet, 3, ["engine-0"], has=-1)
    again.take(stream)
    assert again.expect("took")["took"] == checksum(3)


def test_engines_that_did_not_get_the_last_version_are_met_in_a_new_group(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    stream, _ = begin(outlet, 1, ["engine-0"])
    taking = inlet.chunks(stream, Deadline(5.0, "engine-0", "version 1"), None)
    next(taking)
    taking.close()
    later, _ = begin(outlet, 2, ["engine-0"], has=0)
    assert later.location["group"] != stream.location["group"]
    assert torch.equal(_all(inlet, later), content(2))


# ── One group for many versions ──────────────────────────────────────────────────────────────────────────


def test_the_same_engines_meet_once_for_many_versions(apart, outlet_of, monkeypatch):
    meetings = _counted(monkeypatch)
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    groups = []
    for number in range(1, 6):
        stream, _ = begin(outlet, number, ["engine-0"])
        assert torch.equal(_all(inlet, stream), content(number))
        groups.append(stream.location["group"])
    assert len(set(groups)) == 1
    assert meetings == {"sender": 1, "receiver": 1}
    stream, _ = begin(outlet, 6, ["engine-0", "engine-1"])
    assert stream.location["group"] > groups[-1]
    inlet.close()


def test_an_engine_that_let_a_version_pass_takes_the_next(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    groups = []
    for number, takes in ((1, True), (2, False), (3, True), (4, True)):
        stream, _ = begin(outlet, number, ["engine-0"])
        if takes:
            assert torch.equal(_all(inlet, stream), content(number))
        groups.append(stream.location["group"])
    assert groups[0] == groups[1] < groups[2] == groups[3]
    inlet.close()


def test_a_receiver_that_stops_asking_ends_the_group_and_not_the_sender(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    stream, _ = begin(outlet, 1, ["engine-0"])
    chunks = inlet.chunks(stream, Deadline(20, "engine-0", "version 1"), None)
    next(chunks)
    chunks.close()
    began = time.monotonic()
    stream, _ = begin(outlet, 2, ["engine-0"])
    assert torch.equal(_all(inlet, stream), content(2))
    assert time.monotonic() - began < PROMPT_S
    inlet.close()


def test_memory_is_given_again_where_it_is_large_enough_and_not_while_it_is_read(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    old, _ = begin(outlet, 1, ["engine-0"], share=0.5)
    chunks = inlet.chunks(old, Deadline(20, "engine-0", "version 1"), None)
    found = [_until(chunks, NBYTES // 2)]
    first = outlet._memory.data_ptr()
    new, _ = begin(outlet, 2, ["engine-0"], nbytes=NBYTES // 2)
    assert outlet._memory.data_ptr() == first
    with pytest.raises(SyncError, match="version 1 broke off"):
        found += [chunk.clone() for _, chunk in chunks]
    assert torch.equal(torch.cat(found), content(1)[: NBYTES // 2])
    assert torch.equal(_all(inlet, new), content(2, NBYTES // 2))
    begin(outlet, 3, ["engine-0"], nbytes=2 * NBYTES)
    assert len(outlet._memory) == 2 * NBYTES
    inlet.close()


# ── Where the bytes arrive ───────────────────────────────────────────────────────────────────────────────


def test_bytes_arrive_where_they_belong_without_a_copy(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    stream, _ = begin(outlet, 1, ["engine-0"])
    into = torch.zeros(NBYTES, dtype=torch.uint8)
    for offset, chunk in inlet.chunks(stream, Deadline(20, "engine-0", "version 1"), into):
        assert chunk.data_ptr() == into.data_ptr() + offset
    assert torch.equal(into, content(1))
    inlet.close()


def test_without_a_place_for_them_bytes_arrive_in_a_few_buffers_used_in_turn(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    stream, _ = begin(outlet, 1, ["engine-0"])
    places = {chunk.data_ptr() for _, chunk in inlet.chunks(stream, Deadline(20, "engine-0", "version 1"), None)}
    assert len(places) == 4
    inlet.close()


def test_a_stream_without_bytes_is_a_header_alone(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    for number, nbytes in ((1, 0), (2, NBYTES)):
        stream, _ = begin(outlet, number, ["engine-0"], nbytes=nbytes)
        assert torch.equal(_all(inlet, stream), content(number, nbytes))
    inlet.close()


def test_an_engine_that_is_not_among_the_destinations_is_told_who_is(apart, outlet_of):
    stream, _ = begin(outlet_of(apart), 1, ["engine-0", "engine-1"])
    with pytest.raises(SyncError, match="version 1 was offered to engine-0, engine-1") as caught:
        open_inlet(apart, "engine-2").chunks(stream, Deadline(1, "engine-2", "version 1"), None)
    assert caught.value.who == "engine-2"


def test_nothing_listens_beyond_this_machine(apart, outlet_of):
    outlet, inlet = outlet_of(apart), open_inlet(apart, "engine-0")
    stream, _ = begin(outlet, 1, ["engine-0"])
    _all(inlet, stream)
    listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    inlet.close()


# ── Engines of one machine ───────────────────────────────────────────────────────────────────────────────


def test_one_engine_of_a_machine_receives_and_its_neighbours_copy(channel, outlet_of, engine_of):
    outlet = outlet_of(channel)
    engines = [engine_of(channel, f"engine-{i}") for i in range(3)]
    for number in (1, 2):
        stream, fill = begin(outlet, number, [engine.name for engine in engines], share=0.5)
        assert stream.location["ranks"] == {"engine-0": 1}
        for engine in engines:
            engine.take(stream)
        for engine in engines:
            assert engine.expect("has")["has"] <= NBYTES // 2
        fill()
        assert [engine.expect("took")["took"] for engine in engines] == [checksum(number)] * 3


def test_neighbours_of_a_killed_leader_end_by_their_deadline_and_name_it(channel, outlet_of, engine_of):
    outlet = outlet_of(channel)
    leader = engine_of(channel, "leader")
    others = [engine_of(channel, f"engine-{i}", 2.0) for i in range(2)]
    stream, fill = begin(outlet, 1, ["leader", "engine-0", "engine-1"], share=0.5)
    for engine in (leader, *others):
        engine.take(stream)
    for engine in others:
        engine.expect("has")
    leader.signal(signal.SIGKILL)
    fill()
    for engine in others:
        failed = engine.expect("failed")
        assert failed["failed"] == "DeadlineExceeded"
        assert f"{engine.name} waited 2.0 s for version 1, of which leader had handed on " in failed["why"]
        assert failed["seconds"] < 2.0 + PROMPT_S
    stream, _ = begin(outlet, 2, ["engine-0", "engine-1"])
    for engine in others:
        engine.take(stream)
    assert [engine.expect("took")["took"] for engine in others] == [checksum(2)] * 2


def test_neighbours_of_a_leader_that_gives_up_are_told_at_once(channel, outlet_of, engine_of):
    outlet = outlet_of(channel)
    leader, other = engine_of(channel, "leader", 1.0), engine_of(channel, "engine-0", 60.0)
    stream, _ = begin(outlet, 1, ["leader", "engine-0"], share=0.5)
    for engine in (leader, other):
        engine.take(stream)
    assert leader.expect("failed")["failed"] == "DeadlineExceeded"
    failed = other.expect("failed")
    assert failed["seconds"] < 1.0 + PROMPT_S
    assert "version 1 was given up by leader after" in failed["why"]


def test_a_leader_of_yesterday_does_not_speak_for_the_version_of_today(channel, outlet_of):
    outlet = outlet_of(channel)
    yesterday, today = open_inlet(channel, "yesterday"), open_inlet(channel, "today")
    old, _ = begin(outlet, 1, ["yesterday", "engine-0"], share=0.5)
    chunks = yesterday.chunks(old, Deadline(20, "yesterday", "version 1"), None)
    _until(chunks, NBYTES // 2)
    new, _ = begin(outlet, 2, ["today", "engine-0"])
    assert torch.equal(_all(today, new), content(2))
    with pytest.raises(SyncError, match="version 1 broke off"):
        next(chunks)
    follower = open_inlet(channel, "engine-0")
    assert torch.equal(_all(follower, new), content(2))
    with pytest.raises(SyncError, match="version 1 was replaced by a later one after 0 of"):
        _all(follower, old)
    for inlet in (yesterday, today, follower):
        inlet.close()


def test_a_sender_that_takes_anothers_place_has_later_generations(channel, outlet_of):
    first, _ = begin(outlet_of(channel), 1, ["engine-0"])
    second, _ = begin(outlet_of(channel), 1, ["engine-0"])
    assert second.location["generation"] > first.location["generation"]
    assert second.location["port"] != first.location["port"]


# ── Groups ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pair() -> Iterator[tuple[SocketGroup, SocketGroup]]:
    groups = made(2)
    yield groups[0], groups[1]
    for group in groups:
        group.abort()


def made(size: int, lanes: int = 2) -> list[SocketGroup]:
    """The members of one group, by rank."""
    secret = make_secret()
    meetings = Meetings("127.0.0.1", secret)
    expected = meetings.expect(7, size, lanes)
    found: dict[int, SocketGroup] = {}

    def come(rank: int) -> None:
        connections = meeting.join("127.0.0.1", meetings.port, secret, 7, rank, lanes, 20.0)
        found[rank] = SocketGroup(rank, size, connections)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    gathered = expected.gather(20.0, lambda: False)
    assert gathered is not None
    for thread in threads:
        thread.join()
    meetings.close()
    return [SocketGroup(0, size, gathered), *(found[rank] for rank in range(1, size))]


def test_every_member_gets_every_broadcast_in_order() -> None:
    groups = made(4)
    sent = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in (16, 5_000_000, 0, 1, 3_000_001)]
    found = [[torch.zeros_like(tensor) for tensor in sent] for _ in groups[1:]]
    for group, tensors in zip(groups, [sent, *found], strict=True):
        for tensor in tensors:
            group.begin(tensor, 20.0)
    for group in groups:
        while group.in_flight:
            group.finish(20.0)
        group.close()
    assert all(torch.equal(a, b) for tensors in found for a, b in zip(tensors, sent, strict=True))


def test_memory_is_left_alone_once_an_abort_has_returned(pair) -> None:
    into = [torch.zeros(8 << 20, dtype=torch.uint8) for _ in range(4)]
    for tensor in into:
        pair[1].begin(tensor, 60.0)
    for _ in range(3):
        pair[0].begin(torch.ones(8 << 20, dtype=torch.uint8), 60.0)
    pair[1].abort()
    before = [tensor.clone() for tensor in into]
    time.sleep(0.2)
    assert all(torch.equal(a, b) for a, b in zip(into, before, strict=True))


@pytest.mark.parametrize("aborts", [0, 1])
def test_an_abort_at_either_end_ends_what_is_under_way_at_both(pair, aborts):
    receiver = pair[1]
    for _ in range(4):
        receiver.begin(torch.zeros(1000), 60.0)
    began = time.monotonic()
    pair[aborts].abort()
    with pytest.raises(RuntimeError, match=r"by peer|closure"):
        receiver.finish(60.0)
    assert time.monotonic() - began < PROMPT_S
    with pytest.raises(RuntimeError, match="abandoned"):
        pair[aborts].begin(torch.zeros(1), 1.0)


def test_a_broadcast_that_takes_too_long_breaks_the_group(pair):
    receiver = pair[1]
    receiver.begin(torch.zeros(1000), 0.2)
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        receiver.finish(0.5)
    assert receiver.broken
    pair[0].begin(torch.zeros(1000), 5.0)
    pair[0].finish(5.0)  # the system takes as much as this before it knows
    with pytest.raises(RuntimeError, match="by peer"):
        pair[0].conclude(5.0)


def test_the_id_of_an_nccl_communicator_goes_over_the_connections_of_the_meeting() -> None:
    store, value = dist.HashStore(), bytes(range(128))
    pairs = [socket.socketpair() for _ in range(2)]
    handing = threading.Thread(target=process_group.hand_out_id, args=(store, [ours for ours, _ in pairs]))
    handing.start()
    store.set("0", value)  # type: ignore[arg-type]
    assert [process_group.take_id(theirs) for _, theirs in pairs] == [value, value]
    handing.join()
    assert [one.fileno() for pair in pairs for one in pair] == [-1] * 4


@pytest.mark.parametrize("said", [b"", b"\x80\0\0\0" + bytes(127), b"\xff\xff\xff\xff" + bytes(100)])
def test_what_is_no_id_is_refused_without_room_being_made_for_it(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    theirs.close()
    with pytest.raises(RuntimeError, match=r"is none|gave no id"):
        process_group.take_id(ours)


@pytest.mark.parametrize("before", [None, "1"])
def test_the_environment_is_as_it_was_once_a_group_is_made(monkeypatch, before):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with process_group._watchdog_that_handles_no_errors():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before


@pytest.mark.parametrize("comes", [False, True])
def test_a_process_ends_in_order_while_its_group_is_still_being_made(apart, comes):
    """An engine opens one of its lanes and is not seen again: the sender's thread waits for the other."""
    code = (
        "from collective_ends import begin\n"
        "from headrace.sync.transport import meeting, open_outlet, process_group\n"
        "process_group.FORMING_S = 1.0\n"
        f"stream, _ = begin(open_outlet({apart!r}), 1, ['engine-0'])\n"
        "where = stream.location\n"
        f"secret, come = {apart['secret']!r}, {1 if comes else 2}\n"
        "came = come < 2 and meeting.join(where['host'], where['port'], secret, where['group'], 1, come, 5.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_work_that_does_not_end_is_left_behind_and_what_it_returns_is_discarded():
    go, discarded = threading.Event(), []
    with pytest.raises(TimeoutError, match=r"not within 0\.1 s"):
        process_group.within(0.1, lambda: go.wait(20) and "late", discarded.append)
    go.set()
    while not discarded:
        time.sleep(0.001)
    assert discarded == ["late"]
    assert process_group.within(5.0, lambda: "in time", discarded.append) == "in time"
    with pytest.raises(ValueError, match="broken"):
        process_group.within(5.0, _broken, discarded.append)
    assert discarded == ["late"]


def _broken() -> None:
    raise ValueError("broken")


def _all(inlet: Inlet, stream: Stream) -> torch.Tensor:
    chunks = inlet.chunks(stream, Deadline(20, "an engine", f"version {stream.number}"), None)
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(chunk.clone() for _, chunk in chunks)])


def _until(chunks: Iterator[tuple[int, torch.Tensor]], nbytes: int) -> torch.Tensor:
    found = torch.empty(0, dtype=torch.uint8)
    while len(found) < nbytes:
        found = torch.cat([found, next(chunks)[1].clone()])
    return found


def _counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each side went to a meeting."""
    counts = {"sender": 0, "receiver": 0}

    def counting(place: Any, name: str, side: str) -> None:
        real = getattr(place, name)

        def counted(*args: Any) -> Any:
            counts[side] += 1
            return real(*args)

        monkeypatch.setattr(place, name, counted)

    counting(meeting.Meeting, "gather", "sender")
    counting(collective, "join", "receiver")
    return counts


@given(nbytes=st.integers(0, 400), largest=st.integers(1, 64))
def test_buckets_cover_a_stream_once_and_none_is_too_large(nbytes: int, largest: int) -> None:
    found = collective.cuts(nbytes, located(bucket_bytes=largest, smallest_bytes=4))
    assert [place for first, last in found for place in range(first, last)] == list(range(nbytes))
    assert all(0 < last - first <= largest for first, last in found)


@given(nbytes=st.integers(0, 100_000), smallest=st.integers(1, 8), largest=st.integers(1, 32))
def test_buckets_begin_where_tensors_may(nbytes: int, smallest: int, largest: int) -> None:
    found = collective.cuts(nbytes, located(bucket_bytes=ALIGN * largest, smallest_bytes=ALIGN * smallest))
    assert [first % ALIGN for first, _ in found] == [0] * len(found)
    assert all(0 < last - first <= ALIGN * largest for first, last in found)
    assert [0, *(last for _, last in found)] == [*(first for first, _ in found), nbytes]


def test_connections_within_a_machine_buffer_no_more_than_a_cache_holds() -> None:
    with socket.socket() as any_other:
        for buffer, size in meeting.BUFFERS.items():
            any_other.setsockopt(socket.SOL_SOCKET, buffer, size)
        expected = [any_other.getsockopt(socket.SOL_SOCKET, buffer) for buffer in meeting.BUFFERS]
    groups = made(2, lanes=3)
    ends = [connection._connection for group in groups for peer in group._peers for connection in peer]
    found = [[end.getsockopt(socket.SOL_SOCKET, buffer) for buffer in meeting.BUFFERS] for end in ends]
    assert found == [expected] * 6
    for group in groups:
        group.close()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_stream_in_buckets_of_several_sizes_arrives(in_place: bool) -> None:
    channel = open_channel("collective", bucket_bytes=16 << 10, smallest_bytes=1 << 10)
    outlet, inlet = open_outlet(channel), open_inlet(channel, "engine-0")
    nbytes = 150_001
    version = WeightVersion(number=1, parent=0, step=1)
    draft = Manifest(
        version=version,
        payload="full",
        transport="collective",
        tensors=(),
        nbytes=nbytes,
        streams=(Stream(number=1, nbytes=nbytes),),
    )
    memory = outlet.open(draft, [Destination(name="engine-0", version=0)], torch.device("cpu"))
    memory.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    stream = Stream(number=1, nbytes=nbytes, location=outlet.location())
    outlet.advance(nbytes)
    found, into = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    sizes = set()
    for first, bucket in inlet.chunks(stream, Deadline(20.0, "a", "b"), into if in_place else None):
        found[first : first + len(bucket)] = bucket
        sizes.add(len(bucket))
    assert torch.equal(found, memory)
    assert not in_place or torch.equal(into, memory)
    assert {1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10} <= sizes
    inlet.close()
    outlet.close()
    os.close(channel["descriptor"])


def located(**sizes: int) -> collective.Location:
    return collective.Location(
        host="", port=0, group=0, generation=0, ranks={}, leaders={}, backend="sockets", lanes=1, **sizes
    )
