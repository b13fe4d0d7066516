"""Weights by broadcast: the sender is rank 0 of a process group of its own, engines are the other ranks.

    trainer ─ open ─▶ memory ─ advance ─▶ watermark ┄┄▶ sending thread ══ header, bucket, bucket, … ══▶ inlets
              fills it, never waits                     follows it, some buckets under way at a time

A stream is one small header (which stream follows) and its bytes in buckets. The trainer fills, the thread
sends and the engines unpack at the same time. Members meet as meeting.py says; a group serves stream
after stream as long as the same engines take part, each has got the last one, and nothing fails in it. Whatever
fails ends the group: all its members are told by their closed connections, and the next stream is sent in a new
one. So an engine that dies costs all that take part this version; a sender that is told who did not get it
offers it again, to them alone.

On the host, engines that share the channel's segment receive once: the first of them is a rank and hands the bytes
on (relay.py). NCCL has a rank on each GPU and does better than that by itself.

Whoever connects has to prove that it has the run's secret, and so has the sender (handshake.py). What travels is
not encrypted.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.errors import SyncError
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN
from headrace.sync.transport import process_group
from headrace.sync.transport.meeting import Lanes, Meetings, join
from headrace.sync.transport.process_group import Group, NcclGroup, SocketGroup, reason
from headrace.sync.transport.relay import Relay

NAME = "collective"
LOG = logging.getLogger(__name__)

BUCKET_BYTES = {"sockets": 64 << 20, "nccl": 16 << 20}
"""Of the largest buckets (`cuts`). A receiver that has not one block to receive into needs room for four,
with NCCL on its device."""
SMALLEST_BYTES = 16 << 20
"""Of the first and last ones, where there are larger ones."""
LANES = 2
"""Connections between each two ranks. One is limited by the single thread that serves it at either end."""
AT_ONCE = 4
"""Buckets under way."""
GRACE_S = 0.2
"""So long the next stream waits for the last one, if its last bytes are on their way; then it takes its place."""
_CLOSING_S = 1.0
_HEADER = struct.Struct("<QQ")
"""generation, bytes."""


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream is found."""

    host: str
    port: int
    """Where the sender listens for members."""
    group: int
    generation: int
    """Of the stream. Even, and later streams have larger ones, also when the sender was started again."""
    ranks: dict[str, int]
    """Engines that take part in the broadcast."""
    leaders: dict[str, str]
    """For every engine the one that receives for it: itself, or the one whose relay it reads."""
    backend: str
    bucket_bytes: int
    smallest_bytes: int
    lanes: int


class CollectiveOutlet:
    name = NAME
    align = ALIGN
    keeps = False

    def __init__(
        self,
        secret: str,
        *,
        descriptor: int | None = None,
        host: str = "127.0.0.1",
        backend: str = "auto",
        bucket_bytes: int | None = None,
        smallest_bytes: int = SMALLEST_BYTES,
        timeout_s: float = 120.0,
    ):
        """`host` is the address of this machine at which the engines reach it. The backend "auto" takes NCCL for
        streams from a GPU and sockets for others; "sockets" takes these for all, which a trainer and an engine on
        the same GPU need. Without a descriptor every engine is a rank of its own."""
        self._host, self._backend = host, backend
        self._largest, self._smallest, self._timeout_s = bucket_bytes, smallest_bytes, timeout_s
        self._relay = None if descriptor is None else Relay(descriptor)
        try:
            self._meetings = Meetings(host, secret)
        except OSError as error:
            raise SyncError("announce", NAME, f"nothing can listen at {host}: {error}") from error
        before = 0 if self._relay is None else self._relay.last()
        self._generation = 2 * (max(time.time_ns(), before) // 2)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._number = self._nbytes = 0
        self._group: _SendingGroup | None = None
        self._location: Location | None = None

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        # Who has not got the last stream may have left the group, or be another process, without a sign of it here.
        whole = all(one.version == self._number for one in to)
        self._number, self._nbytes = draft.version.number, draft.streams[-1].nbytes
        backend = self._backend_for(device)
        where = device if backend == "nccl" else torch.device("cpu")
        memory = self._memory
        if memory.device != where or len(memory) < self._nbytes:
            memory = torch.empty(self._nbytes, dtype=torch.uint8, device=where)
        self._offer(to, memory, backend, filled=0, whole=whole)
        return memory[: self._nbytes]

    def location(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self._location)
        return found

    def advance(self, filled: int) -> None:
        if self._group is not None:
            self._group.advance(filled)

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        self._offer(to, self._memory, self._backend_for(self._memory.device), filled=self._nbytes, whole=False)
        return self.location()

    def retain(self, numbers: Sequence[int]) -> None: ...

    def close(self) -> None:
        if self._group is not None:
            self._group.abandon()
            self._group.join(_CLOSING_S)
        if self._relay is not None:
            self._relay.close()
        self._meetings.close()
        self._group = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _backend_for(self, device: torch.device) -> str:
        return "nccl" if self._backend == "auto" and device.type == "cuda" else "sockets"

    def _offer(self, to: Sequence[Destination], memory: Tensor, backend: str, *, filled: int, whole: bool) -> None:
        """To a group of these engines: the last one if that is still `whole`, as far as they go, and works. When
        this has returned the memory is not read for an earlier stream any more."""
        names = [one.name for one in to]
        shared = self._relay is not None and backend == "sockets"
        leaders = {name: names[0] if shared else name for name in names}
        members = tuple(dict.fromkeys(leaders.values()))
        self._generation += 2
        group = self._group
        fits = group is not None and group.members == members and group.device == memory.device
        if group is not None and not (whole and fits and group.rests()):
            group.abandon()
            group = None
        if group is None and members:
            group = self._new_group(members, backend, memory.device)
        self._group, self._memory = group, memory
        self._location = Location(
            host=self._host,
            port=self._meetings.port,
            group=0 if group is None else group.number,
            generation=self._generation,
            ranks={name: rank for rank, name in enumerate(members, start=1)},
            leaders=leaders,
            backend=backend,
            bucket_bytes=self._largest or BUCKET_BYTES[backend],
            smallest_bytes=self._smallest,
            lanes=lanes_of(backend),
        )
        if group is not None:
            group.offer(_Offer(self._location, self._number, memory[: self._nbytes], filled))

    def _new_group(self, members: tuple[str, ...], backend: str, device: torch.device) -> _SendingGroup:
        return _SendingGroup(
            number=self._generation,
            members=members,
            backend=backend,
            device=device,
            meetings=self._meetings,
            seconds=self._timeout_s,
        )


@dataclass
class _Offer:
    """A stream to be sent, and how far it is filled."""

    location: Location
    number: int
    """Of the version."""
    memory: Tensor
    filled: int
    handed_over: bool = False
    """Its last bucket is under way."""


class _SendingGroup:
    """The sender's side of a group, with a thread that makes it and sends stream after stream."""

    def __init__(
        self,
        *,
        number: int,
        members: tuple[str, ...],
        backend: str,
        device: torch.device,
        meetings: Meetings,
        seconds: float,
    ):
        self.number, self.members, self.device = number, members, device
        self._backend, self._seconds = backend, seconds
        self._meeting = meetings.expect(number, 1 + len(members), lanes_of(backend))
        self._changed = threading.Condition()
        self._offer: _Offer | None = None
        self._wanted = 0
        """The thread need not wake before so much is filled."""
        self._over = False
        self._group: Group | None = None
        self._thread = process_group.start_thread(self._run, f"headrace-broadcast-{number}", self.abandon)

    def offer(self, offer: _Offer) -> None:
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def advance(self, filled: int) -> None:
        with self._changed:
            if self._offer is not None:
                self._offer.filled = filled
                if filled >= self._wanted:
                    self._changed.notify_all()

    def rests(self) -> bool:
        """Whether it can take the next stream: the last one was sent and nothing has failed."""
        with self._changed:
            if self._offer is not None and self._offer.handed_over:
                self._changed.wait_for(lambda: self._over or self._offer is None, GRACE_S)
            return self._offer is None and not self._over

    def abandon(self) -> None:
        """Give up what is being sent. Receivers that wait for it are told."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            group = self._group if self._offer is not None else None
        if group is not None:
            group.abort()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            lanes = self._meeting.gather(self._seconds, lambda: self._over)
            if lanes is not None:
                self._send_all(make_group(lanes, 0, 1 + len(self.members), self._backend, self.device))
        except RuntimeError as error:
            with self._changed:
                told = "" if self._offer is None else f" did not get version {self._offer.number}"
                if not self._over:
                    LOG.warning("%s%s: %s", ", ".join(self.members), told, reason(error))
        finally:
            with self._changed:
                self._over, self._group = True, None
                self._changed.notify_all()

    def _send_all(self, group: Group) -> None:
        with self._changed:
            self._group = group
        try:
            while (offer := self._next()) is not None:
                with process_group.on_own_stream(self.device):
                    self._send(group, offer)
                with self._changed:
                    if self._offer is offer:
                        self._offer = None
                    self._changed.notify_all()
            group.close()
        except RuntimeError:
            group.abort()
            raise

    def _next(self) -> _Offer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._offer is not None)
            return None if self._over else self._offer

    def _send(self, group: Group, offer: _Offer) -> None:
        nbytes = len(offer.memory)
        header = list(_HEADER.pack(offer.location.generation, nbytes))
        offer.handed_over = nbytes == 0
        group.begin(torch.tensor(header, dtype=torch.uint8, device=self.device), self._seconds)
        for first, last in cuts(nbytes, offer.location):
            while group.in_flight == AT_ONCE or (group.in_flight and offer.filled < last):
                group.finish(self._seconds)
            self._filled(offer, last)
            offer.handed_over = last == nbytes
            group.begin(offer.memory[first:last], self._seconds)
        while group.in_flight:
            group.finish(self._seconds)
        group.conclude(self._seconds)

    def _filled(self, offer: _Offer, wanted: int) -> None:
        """Wait until so much of it is there: as long as the trainer takes, which may give the stream up."""
        with self._changed:
            self._wanted = wanted
            self._changed.wait_for(lambda: self._over or offer.filled >= wanted)
            if self._over:
                raise RuntimeError("the stream was given up")


class CollectiveInlet:
    def __init__(self, name: str, secret: str, *, descriptor: int | None = None):
        self._name, self._secret = name, secret
        self._relay = None if descriptor is None else Relay(descriptor)
        self._group: Group | None = None
        self._joined: tuple[str, int, int] | None = None
        self._ring = torch.empty(0, dtype=torch.uint8)

    def chunks(self, stream: Stream, deadline: Deadline, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        where = msgspec.convert(stream.location, Location)
        leader = where.leaders.get(self._name)
        if leader is None:
            why = f"version {stream.number} was offered to {', '.join(where.leaders) or 'nobody'}"
            raise SyncError("transfer", self._name, why)
        if leader == self._name:
            return self._receive(where, stream, deadline, into)
        if self._relay is None:
            why = f"version {stream.number} comes by way of {leader}, with which no segment is shared"
            raise SyncError("transfer", self._name, why)
        return self._relay.follow(where.generation, leader, stream, deadline, self._name)

    def close(self) -> None:
        self._leave()
        if self._relay is not None:
            self._relay.close()
        self._ring = torch.empty(0, dtype=torch.uint8)

    def _receive(
        self, where: Location, stream: Stream, deadline: Deadline, into: Tensor | None
    ) -> Iterator[tuple[int, Tensor]]:
        """As a rank of the group. However this ends before the last byte, the group ends with it."""
        hands_on = self._name in [leader for name, leader in where.leaders.items() if name != leader]
        relay = self._relay if hands_on else None
        done = 0
        try:
            group = self._member(where, deadline, into)
            memory = into
            if relay is not None:
                memory = relay.begin(where.generation, stream.nbytes)
            elif into is None or not _fits(into, where.backend):
                memory = None
            self._expect_header(group, where, stream, deadline)
            for first, bucket in self._buckets(group, where, stream.nbytes, memory, deadline):
                if relay is not None:
                    relay.advance(where.generation, first + len(bucket))
                yield first, bucket
                done = first + len(bucket)
            group.conclude(deadline.left)
        except (RuntimeError, OSError) as error:
            self._leave()
            left = deadline.left  # Raises DeadlineExceeded, which tells more, where that is the reason.
            why = f"version {stream.number} broke off after {done} of {stream.nbytes} bytes, {left:.1f} s before"
            raise SyncError("transfer", self._name, f"{why} the deadline: {reason(error)}") from error
        finally:
            if done < stream.nbytes or (self._group is not None and self._group.in_flight):
                self._leave()
                if relay is not None:
                    relay.give_up(where.generation)

    def _buckets(
        self, group: Group, where: Location, nbytes: int, memory: Tensor | None, deadline: Deadline
    ) -> Iterator[tuple[int, Tensor]]:
        """Straight into `memory`; without it into buffers used in turn, each again once its bytes were taken."""
        buckets = cuts(nbytes, where)
        size = max((last - first for first, last in buckets), default=0)
        in_place = memory is not None
        if memory is None:
            memory = self._buffers(min(AT_ONCE, len(buckets)) * size, where.backend)
        waiting: list[tuple[int, Tensor]] = []
        for number, (first, last) in enumerate(buckets):
            start = first if in_place else number % AT_ONCE * size
            waiting.append((first, memory[start : start + last - first]))
            group.begin(waiting[-1][1], deadline.left)
            if len(waiting) == AT_ONCE:
                group.finish(deadline.left)
                yield waiting.pop(0)
        for found in waiting:
            group.finish(deadline.left)
            yield found

    def _expect_header(self, group: Group, where: Location, stream: Stream, deadline: Deadline) -> None:
        header = torch.zeros(_HEADER.size, dtype=torch.uint8, device=_device(where.backend))
        group.begin(header, deadline.left)
        group.finish(deadline.left)
        generation, nbytes = _HEADER.unpack(header.cpu().numpy().tobytes())
        if (generation, nbytes) != (where.generation, stream.nbytes):
            raise RuntimeError(f"another stream came: {generation} of {nbytes} bytes, not {where.generation}")

    def _member(self, where: Location, deadline: Deadline, into: Tensor | None) -> Group:
        wanted = (where.host, where.port, where.group)
        if self._group is not None and self._joined == wanted and not self._group.broken:
            return self._group
        self._leave()
        seconds = deadline.left
        device = into.device if into is not None and _fits(into, where.backend) else _device(where.backend)
        self._group = process_group.within(seconds, lambda: self._join(where, device, seconds), Group.abort)
        self._joined = wanted
        return self._group

    def _join(self, where: Location, device: torch.device, seconds: float) -> Group:
        rank, size = where.ranks[self._name], 1 + len(where.ranks)
        lanes = join(where.host, where.port, self._secret, where.group, rank, where.lanes, seconds)
        return make_group(lanes, rank, size, where.backend, device)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None and group.in_flight:
            group.abort()
        elif group is not None:
            group.close()

    def _buffers(self, nbytes: int, backend: str) -> Tensor:
        device = _device(backend)
        if len(self._ring) < nbytes or self._ring.device != device:
            self._ring = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._ring


def cuts(nbytes: int, where: Location) -> list[tuple[int, int]]:
    """Where a stream's buckets begin and end. Each costs, so they are large; but small ones come first, for sending
    to begin soon, and last, for little to be left when the last byte is there. They begin where tensors may."""
    ahead: list[int] = []
    size, left = min(where.smallest_bytes, where.bucket_bytes), -(-nbytes // ALIGN) * ALIGN
    while left > 2 * size:
        ahead.append(size)
        left -= 2 * size
        size = min(2 * size, where.bucket_bytes)
    second = max(left // 2 // ALIGN * ALIGN, left - size)
    between = [left] if left <= size else [left - second, second]
    ends = [min(end, nbytes) for end in accumulate([0, *ahead, *between, *reversed(ahead)])]
    return [(first, last) for first, last in pairwise(ends) if first < last]


def lanes_of(backend: str) -> int:
    return 1 if backend == "nccl" else LANES


def make_group(lanes: Lanes, rank: int, size: int, backend: str, device: torch.device) -> Group:
    """`lanes` are the meeting's connections, which are the group's from now on."""
    if backend == "nccl":
        return NcclGroup(rank, size, [connection for [connection] in lanes], device=device)
    return SocketGroup(rank, size, lanes)


def _fits(memory: Tensor, backend: str) -> bool:
    """Whether the backend can receive into it."""
    return memory.device.type == ("cuda" if backend == "nccl" else "cpu")


def _device(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
