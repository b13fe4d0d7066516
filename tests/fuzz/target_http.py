"""Requests to the weight server: a stranger's at its door, and where they are proved, served over a connection.

SIGN in an input becomes the proof that belongs to the request around it, so that bytes also reach what lies behind
the proof. Pieces between two CUTs arrive one after the other. No answer to a request without a proof
has a byte of the weights, and nothing that is answered has less than a whole head.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from fuzz_mutations import havoc

from headrace.sync.transport.door import RefusedError
from headrace.sync.transport.http import _Served, _Server, _Visit
from headrace.sync.transport.http_head import HEAD_BYTES

SIGN, CUT = b"@SIGN@", b"@CUT@"
SECRET = "0123456789abcdef" * 4
WEIGHTS = b"\x00weights\xff" * 3000
declared = (RefusedError,)
longest = 3 * HEAD_BYTES
watched = ("headrace.sync.transport",)
dictionary = (
    SIGN, CUT, b"GET ", b"HEAD ", b"POST ", b"/streams/", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"\r\n", b"\r\n\r\n",
    b"\n\n", b"Authorization: Headrace ", b"Range: bytes=", b"0-", b"-5", b"0-0,5-6", b"999999999999999999-", b": ",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"\t", b"%2e%2e/",
    b"\xff", b"a" * 300,
)  # fmt: skip
_LINE = re.compile(rb"(GET|HEAD) (\S+) HTTP")
_RANGE = re.compile(rb"\r\nrange:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)
_server: list[_Server] = []


@contextmanager
def session() -> Iterator[None]:
    """A server with a stream on offer; its name is the same in every process, so that an input can be replayed."""
    server = _Server("127.0.0.1", 0, SECRET)
    server.offer._sender = "cafe"
    server.offer.replace(memoryview(WEIGHTS))
    server.offer.advance(len(WEIGHTS))
    _server[:] = [server]
    try:
        yield
    finally:
        server.end()


def corpus() -> list[bytes]:
    get, sign = b"GET /streams/cafe-1 HTTP/1.1\r\n", b"Authorization: " + SIGN + b"\r\n"
    whole = get + b"Host: a\r\n" + sign + b"Range: bytes=0-99\r\n\r\n"
    return [
        whole,
        whole + CUT + whole,
        get + sign + b"\r\n" + CUT + get + sign + b"Range: bytes=20000-\r\n\r\n",
        get[:20] + CUT + get[20:] + sign + b"Connection: close\r\n\r\n",
        b"HEAD /streams/cafe-1 HTTP/1.0\r\n" + sign + b"\r\n",
        b"GET /streams/cafe-0 HTTP/1.1\r\n" + sign + b"\r\n",
        b"GET /streams/other HTTP/1.1\r\n" + sign + b"Range: bytes=9-1\r\n\r\n",
        get + b"Authorization: Headrace " + b"0" * 32 + b":" + b"0" * 64 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
    ]


def generate(random: Random) -> bytes:
    """Heads of any fields, often signed, in any pieces."""
    heads = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        lines = [
            random.choice((b"GET", b"HEAD", b"PUT"))
            + b" "
            + _path(random)
            + b" HTTP/1."
            + random.choice((b"0", b"1", b"2"))
        ]
        for _ in range(random.choice((0, 1, 3, 100))):
            lines.append(
                random.choice((b"A: b", b"Range: bytes=%d-%d", b"Connection: close", b"x", b": y")).replace(
                    b"%d", str(random.choice((0, 1, 500, 29_999, 30_000, 10**17))).encode()
                )
            )
        if random.random() < 0.8:
            lines.insert(random.randint(1, len(lines)), b"Authorization: " + SIGN)
        heads.append(b"\r\n".join(lines) + b"\r\n\r\n")
    data = CUT.join(heads)
    if random.random() < 0.3:
        place = random.randint(0, len(data))
        data = data[:place] + CUT + data[place:]
    return data


def mutate(data: bytes, random: Random) -> bytes:
    """Changed anywhere but in the marks."""
    parts = re.split(b"(" + SIGN + b"|" + CUT + b")", data)
    place = random.randrange(len(parts))
    if parts[place] not in (SIGN, CUT):
        parts[place] = havoc(parts[place], random, dictionary, (), longest)
    return b"".join(parts)


def _path(random: Random) -> bytes:
    return random.choice(
        (b"/streams/cafe-1", b"/streams/cafe-1", b"/streams/cafe-7", b"/", b"/../x", b"x", b"/" + b"y" * 400)
    )


def run(data: bytes) -> None:
    server = _server[0]
    pieces = [_signed(piece) for piece in data.split(CUT)]
    visit = _Visit(server)
    proved = None
    while pieces and proved is None:
        piece = pieces.pop(0)
        for at in range(0, len(piece), HEAD_BYTES):
            try:
                proved = visit.receive(piece[at : at + HEAD_BYTES])
            except RefusedError as error:
                _check(error.answer, proved=False)
                raise
            if proved is not None:
                break
    if proved is None:
        assert len(visit._reader._got) <= HEAD_BYTES
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    with theirs:
        for piece in pieces[:1]:
            theirs.sendall(piece)
        theirs.shutdown(socket.SHUT_WR)
        _Served(server, ours).run(proved)
        answer = b""
        try:
            while part := theirs.recv(1 << 16):
                answer += part
        except ConnectionResetError:  # more was sent than the server cared to read
            return
        _check(answer, proved=True)


def _check(answer: bytes, proved: bool) -> None:
    assert b"\r\n\r\n" in answer
    assert re.match(rb"HTTP/1\.1 [2-5][0-9][0-9] ", answer)
    assert proved or b"weights" not in answer
    assert SECRET.encode() not in answer


def _signed(piece: bytes) -> bytes:
    """With the proofs of the first request in it."""
    line, wanted = _LINE.search(piece), _RANGE.search(piece)
    if SIGN not in piece or line is None:
        return piece
    method, path = line[1].decode(), line[2].decode("latin-1")
    proof = _server[0].credentials.of_request(
        method, path, None if wanted is None else wanted[1].decode("latin-1")
    )[1]
    return piece.replace(SIGN, proof.encode())
