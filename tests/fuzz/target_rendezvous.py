"""The handshake of the collective transport, at either side, and the id that goes over its connections.

An input's first byte says who hears it. The listener's caller may have the secret: then the bytes are its claims,
and a proof is put behind each.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from headrace.sync.transport import process_group
from headrace.sync.transport.door import RefusedError
from headrace.sync.transport.handshake import (
    ANSWER_BYTES,
    CALL_BYTES,
    GREETING_BYTES,
    WORD,
    Answer,
    CallerSide,
    Claim,
    HandshakeError,
)
from headrace.sync.transport.meeting import Meetings, _Caller

SECRET = "0123456789abcdef" * 4
STRANGER, MEMBER, LISTENER, ID = range(4)
declared = (HandshakeError, RefusedError)
longest = 8192
watched = ("headrace.sync.transport",)
dictionary = (
    WORD,
    b"w",
    b"t",
    b"g",
    struct.pack("<QII", 7, 1, 0),
    struct.pack("<QII", 7, 1, 1),
    b"\xff" * 8,
    b"\x00" * 8,
)
_meetings: list[Meetings] = []


@contextmanager
def session() -> Iterator[None]:
    meetings = Meetings("127.0.0.1", SECRET)
    _meetings[:] = [meetings]
    process_group.FORMING_S = 0.5
    try:
        yield
    finally:
        meetings.close()


def corpus() -> list[bytes]:
    claim = struct.pack("<QII", 7, 1, 0)
    return [
        bytes([STRANGER]) + bytes(CALL_BYTES),
        bytes([STRANGER]) + bytes(CALL_BYTES - 1),
        bytes([MEMBER]) + claim,
        bytes([MEMBER]) + struct.pack("<QII", 8, 1, 0),
        bytes([MEMBER]) + claim + claim,
        bytes([LISTENER]) + WORD + bytes(32) + b"w" + bytes(32),
        bytes([LISTENER]) + WORD + bytes(GREETING_BYTES),
        bytes([ID]) + struct.pack("<I", 128) + bytes(128),
        bytes([ID]) + struct.pack("<I", 2**32 - 1) + bytes(128),
    ]


def mutate(data: bytes, random: Random) -> bytes:
    """Another length, another cut, or one number of the claim."""
    kind = data[:1] or b"\0"
    rest = data[1:]
    if random.random() < 0.3:
        length = random.choice((0, 1, 16, GREETING_BYTES, CALL_BYTES, GREETING_BYTES + ANSWER_BYTES, 4096))
        return kind + (rest + random.randbytes(4096))[: max(0, length + random.randint(-1, 1))]
    if random.random() < 0.5:
        return bytes([MEMBER]) + struct.pack(
            "<QII",
            random.choice((0, 7, 7, 2**64 - 1)),
            random.choice((0, 1, 2, 2**32 - 1)),
            random.choice((0, 1, 2)),
        )
    return bytes([random.randrange(4)]) + rest


def run(data: bytes) -> None:
    kind, said = data[0] % 4 if data else STRANGER, data[1:]
    if kind == STRANGER:
        _stranger(said)
    elif kind == MEMBER:
        _member(said)
    elif kind == LISTENER:
        side = CallerSide(SECRET, Claim(7, 1, 0))
        assert len(side.call(said[:GREETING_BYTES])) == CALL_BYTES
        side.conclude(said[GREETING_BYTES : GREETING_BYTES + ANSWER_BYTES])
        raise AssertionError("an impostor was believed")
    else:
        _id(said)


def _stranger(said: bytes) -> None:
    caller = _Caller(SECRET)
    for at in range(0, len(said), 33):
        claim = caller.receive(said[at : at + 33])
        assert claim is None, "a stranger was believed"
    assert len(caller._side._got) <= CALL_BYTES


def _member(said: bytes) -> None:
    """Somebody with the secret, who comes as often as the bytes have claims."""
    meetings = _meetings[0]
    meeting = meetings.expect(7, 3, 2)
    for at in range(0, min(len(said), 64), 16):
        claim = Claim(*struct.unpack("<QII", said[at : at + 16].ljust(16, b"\0")))
        caller, side = _Caller(SECRET), CallerSide(SECRET, claim)
        found = caller.receive(side.call(caller.greeting))
        assert found == claim
        with socket.create_server(("127.0.0.1", 0)) as listening:
            theirs = socket.create_connection(listening.getsockname())
            ours, _ = listening.accept()
        with theirs, ours:
            try:
                meetings._admit(ours, caller, claim)
                said_to, expected = theirs.recv(ANSWER_BYTES), {Answer.WELCOME}
            except RefusedError as error:
                said_to, expected = error.answer, {Answer.TAKEN, Answer.GONE}
            assert side.conclude(said_to) in expected
    assert meeting.gather(5.0, lambda: True) is None


def _id(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        try:
            found = process_group.take_id(ours)
        except RuntimeError as error:
            raise HandshakeError(str(error)) from error
    assert found == said[4 : 4 + struct.unpack("<I", said[:4])[0]]
