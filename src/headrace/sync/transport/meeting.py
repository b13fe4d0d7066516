"""Where the members of a group meet: receivers connect to the sender, and both prove that they belong together.

    sender                                          a receiver, rank r
    expects the group's ranks and lanes             opens each of its lanes: handshake.py
    has a connection for every place, or gives up   is welcome, or told why not

The connections that were made are then the group's. The sender's port is the only one that listens; a caller
without the run's secret gets no further than door.py lets it. One with it gets the place it asks for, if that is
free.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace.sync.transport.door import Door, RefusedError
from headrace.sync.transport.handshake import (
    ANSWER_BYTES,
    GREETING_BYTES,
    Answer,
    CallerSide,
    Claim,
    HandshakeError,
    ListenerSide,
)

Lanes = list[list[socket.socket]]
"""Connections, by the number of the peer and then of the lane."""
BUFFERS = {socket.SO_SNDBUF: 256 << 10, socket.SO_RCVBUF: 1 << 20}
"""Bytes, of a connection within a machine; the system doubles them. Left alone, the system lets more be under way
than the processor's cache holds, and every byte goes to memory and back."""
_LOOK_S = 0.05
"""So often a sender that waits for its receivers looks whether it is still to wait."""
_CALL_AGAIN_S = (0.01, 0.5)
"""Pauses between calls, of one whom a crowd of strangers kept from being heard."""


class Meetings:
    """The sender's side: one listening socket for all of its groups. Thread-safe."""

    def __init__(self, host: str, secret: str):
        """At a port of `host` that was free. Raises OSError."""
        self._secret = secret
        self._expected: dict[int, Meeting] = {}
        self._lock = threading.Lock()
        self._door = Door(host, 0, name="headrace-meetings", meet=self._meet, admit=self._admit)
        self.port: int = self._door.port

    def expect(self, group: int, size: int, lanes: int) -> Meeting:
        """Whoever comes for one of the ranks from 1 to `size` - 1 and one of the lanes is let in from now on, until
        the meeting is over."""
        with self._lock:
            self._expected[group] = Meeting(group, size, lanes, self._forget)
            return self._expected[group]

    def close(self) -> None:
        self._door.close()

    def _forget(self, group: int) -> None:
        with self._lock:
            self._expected.pop(group, None)

    def _meet(self) -> _Caller:
        return _Caller(self._secret)

    def _admit(self, connection: socket.socket, caller: _Caller, claim: Claim) -> None:
        with self._lock:
            meeting = self._expected.get(claim.group)
        if meeting is None:
            raise RefusedError("its group is not being formed", caller.answer(Answer.GONE))
        meeting.admit(connection, caller, claim)


class Meeting:
    """The forming of one group, as the sender sees it."""

    def __init__(self, group: int, size: int, lanes: int, forget: Callable[[int], None]):
        self._group, self._forget = group, forget
        self._changed = threading.Condition()
        self._places: dict[tuple[int, int], socket.socket | None] = {
            (rank, lane): None for rank in range(1, size) for lane in range(lanes)
        }

    def gather(self, seconds: float, given_up: Callable[[], bool]) -> Lanes | None:
        """Wait until every place is taken. None when `given_up` says so first. Raises RuntimeError after `seconds`.
        The meeting is over then."""
        end = time.monotonic() + seconds
        with self._changed:
            try:
                while not all(self._places.values()):
                    if given_up():
                        return None
                    if time.monotonic() > end:
                        receivers = len({rank for rank, _ in self._places})
                        raise RuntimeError(f"not all of {receivers} receivers came within {seconds:.1f} s")
                    self._changed.wait(_LOOK_S)
                found: dict[int, list[socket.socket]] = {}
                for (rank, _), connection in self._places.items():
                    assert connection is not None
                    found.setdefault(rank, []).append(connection)
                self._places = {}
                return list(found.values())
            finally:
                self._forget(self._group)
                for left in filter(None, self._places.values()):
                    left.close()
                self._places = {}

    def admit(self, connection: socket.socket, caller: _Caller, claim: Claim) -> None:
        place = (claim.rank, claim.lane)
        with self._changed:
            if place not in self._places:
                raise RefusedError("its group has no such place, or is over", caller.answer(Answer.GONE))
            if self._places[place] is not None:
                raise RefusedError("somebody has its place", caller.answer(Answer.TAKEN))
            # The answer is small, and nothing else was sent since the greeting: this cannot wait.
            connection.sendall(caller.answer(Answer.WELCOME))
            _prepare(connection)
            self._places[place] = connection
            self._changed.notify_all()


class _Caller:
    """What one caller has said so far (door.Visit)."""

    def __init__(self, secret: str):
        self._side = ListenerSide(secret)
        self.greeting = self._side.greeting
        self.answer = self._side.answer

    def receive(self, data: bytes) -> Claim | None:
        try:
            return self._side.receive(data)
        except HandshakeError as error:
            raise RefusedError(str(error)) from error


def join(host: str, port: int, secret: str, group: int, rank: int, lanes: int, seconds: float) -> Lanes:
    """A receiver's side: its connections to the sender, whose proof it has seen. Raises RuntimeError where that is
    not to be, TimeoutError after `seconds`, and OSError."""
    end = time.monotonic() + seconds
    made: list[socket.socket] = []
    try:
        for lane in range(lanes):
            made.append(_call_until_heard(host, port, secret, Claim(group, rank, lane), end))
    except BaseException:
        for connection in made:
            connection.close()
        raise
    return [made]


def _call_until_heard(host: str, port: int, secret: str, claim: Claim, end: float) -> socket.socket:
    pause, longest = _CALL_AGAIN_S
    while True:
        try:
            return _call(host, port, secret, claim, end)
        except (ConnectionResetError, BrokenPipeError):
            if time.monotonic() + pause > end:
                raise
            time.sleep(pause)
            pause = min(2 * pause, longest)


def _call(host: str, port: int, secret: str, claim: Claim, end: float) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_left(end))
    try:
        side = CallerSide(secret, claim)
        connection.sendall(side.call(_read(connection, GREETING_BYTES, end)))
        answer = side.conclude(_read(connection, ANSWER_BYTES, end))
        if answer is Answer.TAKEN:
            why = "this engine was in the group before it was started again"
            raise RuntimeError(f"rank {claim.rank} is taken: {why}")
        if answer is Answer.GONE:
            raise RuntimeError("the sender does not wait for this engine in that group, or not any more")
        connection.settimeout(None)
        _prepare(connection)
    except HandshakeError as error:
        connection.close()
        raise RuntimeError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int, end: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(_left(end))
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the sender closed the connection before it had proved itself")
        data += part
    return data


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the sender did not answer in time")
    return left


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    addresses: list[Any] = [connection.getpeername()[0], connection.getsockname()[0]]
    if addresses[0] == addresses[1]:
        for buffer, size in BUFFERS.items():
            connection.setsockopt(socket.SOL_SOCKET, buffer, size)
