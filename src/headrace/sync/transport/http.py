"""Weights over HTTP, from the sender's memory.

    GET  /streams/<name>    Range: bytes=a-b      206, then those bytes as they are filled
    HEAD /streams/<name>                          200 while the stream is on offer

    400   no request of these                           401   without a proof, or with one that was used before
    404   no stream of this sender                      410   replaced by a later one
    416   these are no bytes of the stream              503   they are not filled yet, or too many are connected:
                                                              ask again

The memory is used again for the next stream. Bytes that were under way then may be of either, so a receiver asks
once more, when it has them all, whether the stream is still on offer. No name is used twice, by any sender.

Both ends prove that they have the run's secret: a request has `Authorization: Headrace <nonce>:<proof>`, the answer
that is believed has `Headrace-Proof` (proofs.py). What travels is not encrypted.

Until its first request is proved a connection is a stranger (door.py), which costs no thread. Requests have no
bodies and a head of at most HEAD_BYTES (http_head.py).
"""

from __future__ import annotations

import http.client
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from headrace.errors import DeadlineExceeded, SyncError
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN
from headrace.sync.transport.door import Door, RefusedError
from headrace.sync.transport.http_head import BadRequestError, HeadReader, Request, range_of
from headrace.sync.transport.proofs import Credentials

NAME = "http"
LOG = logging.getLogger(__name__)
RANGE_BYTES = 64 << 20
"""What a receiver asks for at once: a request costs as much time as a few MiB."""
CHUNK_BYTES = 4 << 20
"""What it takes from an answer at once."""
SLICE_BYTES = 1 << 20
"""What the sender puts into one, then looks whether the stream is still on offer."""
HOLD_S = 5.0
"""Longest that the sender waits for a slice to be filled."""
SILENCE_S = 15.0
"""After so long without a byte a receiver takes the connection for broken."""
IDLE_S = 60.0
"""After so long without a request, or without taking a slice, a connection is closed."""
HEAD_S = 5.0
"""A request's head comes within this time from its first byte on."""
CONNECTIONS, CONNECTIONS_OF_ENGINE = 16, 4
"""So many connections are served: at least, and for each engine. An engine has one, and now and then another that
has broken without a sign."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


# ── Sending ──────────────────────────────────────────────────────────────────────────────────────────────


class _Offer:
    """The stream on offer, for all threads."""

    def __init__(self) -> None:
        self._sender = secrets.token_hex(8)
        self._count = 0
        self._filled = 0
        self._used: set[bytes] = set()
        """Nonces of requests for the stream on offer. Only whoever has the secret can add to them."""
        self._changed = threading.Condition()
        self.current = (f"{self._sender}-0", memoryview(b""))
        """(name, bytes), replaced together."""

    def replace(self, view: memoryview) -> None:
        with self._changed:
            self._count, self._filled = self._count + 1, 0
            self._used.clear()
            self.current = (f"{self._sender}-{self._count}", view)
            self._changed.notify_all()

    def advance(self, filled: int) -> None:
        with self._changed:
            self._filled = filled
            self._changed.notify_all()

    def use(self, name: str, nonce: bytes) -> bool:
        """Whether this is the first request for the stream with this nonce. A request that somebody saw on the way
        and sends again is not."""
        with self._changed:
            if name == self.current[0]:
                first = nonce not in self._used
                self._used.add(nonce)
                return first
        return True

    def wait(self, name: str, filled: int) -> bool:
        """Until so many bytes of this stream are there, or it is replaced: False where neither comes in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.current[0] != name or self._filled >= filled, HOLD_S)

    def fault(self, name: str) -> HTTPStatus | None:
        """Why this stream is not to be had."""
        if name == self.current[0]:
            return None
        return HTTPStatus.GONE if name.startswith(f"{self._sender}-") else HTTPStatus.NOT_FOUND


class _Served:
    """One connection that has proved itself, in a thread of its own."""

    def __init__(self, server: _Server, connection: socket.socket):
        self._server, self._offer, self._connection = server, server.offer, connection
        self._closing = False

    def run(self, request: Request) -> None:
        """Answer this request and all that follow. That a receiver goes away is its own business."""
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                self._connection.settimeout(IDLE_S)
                self._answer(request)
                if self._closing or request.last:
                    return
                request = self._next()
        except OSError:
            return
        except RefusedError as error:
            self._tell(error.answer)
        finally:
            self._server.gone(self._connection)

    def _next(self) -> Request:
        reader, end = HeadReader(), 0.0
        while True:
            data = self._connection.recv(4096)
            if not data:
                raise ConnectionError("the receiver has closed it")
            end = end or time.monotonic() + HEAD_S
            request = self._server.proved(reader, data)
            if request is not None:
                return request
            self._connection.settimeout(max(1e-3, end - time.monotonic()))

    def _answer(self, request: Request) -> None:
        name, view = self._offer.current
        asked = request.path.removeprefix("/streams/")
        if asked != name:
            return self._head(request, self._offer.fault(asked) or HTTPStatus.GONE)
        if not self._offer.use(name, request.nonce):
            raise RefusedError("a request was repeated", unauthorized())
        if request.method == "HEAD":
            return self._head(request, HTTPStatus.OK, {"Content-Length": str(len(view)), "ETag": f'"{name}"'})
        first, last = range_of(request.range, len(view))
        if not 0 <= first <= last < len(view):
            unfit = {"Content-Range": f"bytes */{len(view)}"}
            self._head(request, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, unfit)
        elif not self._offer.wait(name, min(first + SLICE_BYTES, last + 1)):
            self._head(request, HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "0"})
        elif fault := self._offer.fault(name):
            self._head(request, fault)
        else:
            headers = {"Content-Length": str(last + 1 - first), "ETag": f'"{name}"'}
            if request.range is not None:
                headers["Content-Range"] = f"bytes {first}-{last}/{len(view)}"
            self._head(request, HTTPStatus.OK if request.range is None else HTTPStatus.PARTIAL_CONTENT, headers)
            self._send(name, view[: last + 1], first)

    def _send(self, name: str, view: memoryview, first: int) -> None:
        """The bytes from `first` on, as they are filled."""
        for at in range(first, len(view), SLICE_BYTES):
            piece = view[at : at + SLICE_BYTES]
            if not self._offer.wait(name, at + len(piece)) or self._offer.fault(name):
                self._closing = True  # an answer cut short: whoever asks again hears why
                return
            self._connection.sendall(piece)

    def _head(self, request: Request, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        fields = headers or {}
        if status >= 300 and status != HTTPStatus.SERVICE_UNAVAILABLE:
            # Whoever asks for what is not to be had may have the request from somebody else, and holds no place.
            self._closing = True
            fields["Connection"] = "close"
        came = fields.get("Content-Range", "")
        proof = self._server.credentials.of_answer(request.nonce, request.path, status, came)
        # The proof first: a receiver that has the range knows that the head was not cut before the proof.
        self._connection.sendall(head_of(status, {"Headrace-Proof": proof, "Content-Length": "0", **fields}))

    def _tell(self, answer: bytes) -> None:
        try:
            self._connection.sendall(answer)
        except OSError:
            return


def head_of(status: HTTPStatus, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", "Server: headrace"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


def refusal(status: HTTPStatus, **headers: str) -> bytes:
    """An answer after which the connection is closed. It says nothing of what is served."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return head_of(status, {"Content-Length": "0", "Connection": "close", **named})


def unauthorized() -> bytes:
    return refusal(HTTPStatus.UNAUTHORIZED, WWW_Authenticate="Headrace")


class _Visit:
    """What a stranger has sent so far (door.Visit)."""

    greeting = b""

    def __init__(self, server: _Server):
        self._server, self._reader = server, HeadReader()

    def receive(self, data: bytes) -> Request | None:
        return self._server.proved(self._reader, data)


class _Server:
    """A door, and a thread for each connection that came through it; `end` ends them all."""

    def __init__(self, host: str, port: int, secret: str):
        """Raises OSError."""
        self.offer = _Offer()
        self.credentials = Credentials(secret)
        self.most = CONNECTIONS
        """Connections served at a time."""
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._door = Door(host, port, name="headrace-http", meet=lambda: _Visit(self), admit=self._admit)

    @property
    def url(self) -> str:
        host = f"[{self._door.host}]" if self._door.six else self._door.host
        return f"http://{host}:{self._door.port}"

    def proved(self, reader: HeadReader, data: bytes) -> Request | None:
        """The request that these bytes complete, from somebody with the secret; None while some are missing. Raises
        RefusedError."""
        try:
            request = reader.receive(data)
        except BadRequestError as error:
            raise RefusedError(str(error), refusal(error.status)) from error
        if request is not None and not self.credentials.fits(request):
            raise RefusedError("the proof is not of this run's secret", unauthorized())
        return request

    def gone(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
        connection.close()

    def end(self) -> None:
        self._door.close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                pass
        self.offer.replace(memoryview(b""))
        for thread in connections.values():
            thread.join()

    def _admit(self, connection: socket.socket, visit: _Visit, request: Request) -> None:
        served = _Served(self, connection)
        thread = threading.Thread(target=served.run, args=(request,), name="headrace-http-connection", daemon=True)
        with self._lock:
            if len(self._connections) >= self.most:
                later = refusal(HTTPStatus.SERVICE_UNAVAILABLE, Retry_After="1")
                raise RefusedError(f"{self.most} connections are served", later)
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread for it
            with self._lock:
                del self._connections[connection]
            raise RefusedError(str(error), refusal(HTTPStatus.SERVICE_UNAVAILABLE, Retry_After="1")) from error


class HttpOutlet:
    name = NAME
    align = ALIGN
    keeps = False

    def __init__(self, host: str, port: int, secret: str):
        try:
            self._server = _Server(host, port, secret)
        except OSError as error:
            raise SyncError("announce", NAME, f"nothing can be served at {host}, port {port}: {error}") from error
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        self._server.most = max(CONNECTIONS, CONNECTIONS_OF_ENGINE * len(to))
        nbytes = draft.streams[-1].nbytes
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        memory = self._memory[:nbytes]
        self._server.offer.replace(memory.numpy().data)
        return memory

    def location(self) -> dict[str, Any]:
        return {"url": f"{self._server.url}/streams/{self._server.offer.current[0]}"}

    def advance(self, filled: int) -> None:
        self._server.offer.advance(filled)

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        return self.location()

    def retain(self, numbers: Sequence[int]) -> None: ...

    def close(self) -> None:
        self._server.end()


# ── Receiving ────────────────────────────────────────────────────────────────────────────────────────────


class _Later(Exception):
    """The server cannot answer now; after so many seconds it may."""

    def __init__(self, status: int, seconds: float):
        super().__init__(f"the answer was {status}")
        self.seconds = seconds


class HttpInlet:
    """One connection, which is made again whenever it breaks; then what came is not asked for again."""

    def __init__(self, secret: str):
        self._credentials = Credentials(secret)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket
        self._answer: http.client.HTTPResponse
        self._left = 0
        """Bytes of the answer that are still to come."""
        self._pause = FIRST_PAUSE_S

    def chunks(self, stream: Stream, deadline: Deadline, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        direct = into is not None and into.device.type == "cpu"
        target = into if direct else torch.empty(min(CHUNK_BYTES, stream.nbytes), dtype=torch.uint8)
        assert target is not None
        try:
            for first in range(0, stream.nbytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, stream.nbytes - first)
                chunk = target[first : first + count] if direct else target[:count]
                view, done = chunk.numpy().data, 0
                while done < count:
                    done += self._insist(partial(self._take, stream, first + done, view[done:], deadline), deadline)
                yield first, chunk
            self._insist(partial(self._confirm, stream, deadline), deadline)
        finally:
            if self._left:
                self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self._left = None, 0

    def _insist(self, attempt: Callable[[], int], deadline: Deadline) -> int:
        """Again and again until it succeeds, with longer and longer pauses."""
        while True:
            try:
                done = attempt()
                self._pause = FIRST_PAUSE_S
                return done
            except (OSError, http.client.HTTPException, _Later) as error:
                self.close()
                self._wait(error, deadline)

    def _take(self, stream: Stream, at: int, view: memoryview, deadline: Deadline) -> int:
        """Put some of the stream's bytes from `at` on into `view`: what has come, by one read, which waits no
        longer than the deadline."""
        if self._left == 0:
            count = min(RANGE_BYTES, stream.nbytes - at)
            self._answer = self._ask(stream, at, count, deadline)
            self._left = count
        self._socket.settimeout(min(deadline.left, SILENCE_S))
        count = self._answer.fp.readinto1(view[: self._left])
        if count == 0:
            raise ConnectionError("the answer was cut short")
        self._left -= count
        if self._left == 0:
            self._answer.close()
        return count

    def _confirm(self, stream: Stream, deadline: Deadline) -> int:
        """That the stream is still on offer."""
        self._ask(stream, stream.nbytes, 0, deadline).close()
        return 0

    def _ask(self, stream: Stream, at: int, count: int, deadline: Deadline) -> http.client.HTTPResponse:
        """The answer to a request for `count` bytes from `at` on, which are not read yet. None: for the head."""
        url = urlsplit(stream.location["url"])
        connection = self._connect(url.hostname or "", url.port or 80, min(deadline.left, SILENCE_S))
        method, wanted = ("GET", f"bytes={at}-{at + count - 1}") if count else ("HEAD", None)
        nonce, authorization = self._credentials.of_request(method, url.path, wanted)
        headers = {"Authorization": authorization} | ({} if wanted is None else {"Range": wanted})
        connection.request(method, url.path, headers=headers)
        answer = connection.getresponse()
        given = (answer.headers.get("Headrace-Proof", ""), answer.headers.get("Content-Range", ""))
        proved = self._credentials.answers(nonce, url.path, answer.status, *given)
        try:
            self._check(answer, stream, at, count, proved)
        except SyncError:
            self.close()
            raise
        return answer

    def _connect(self, host: str, port: int, timeout: float) -> http.client.HTTPConnection:
        connection = self._connection
        if connection is None or connection.sock is None or (connection.host, connection.port) != (host, port):
            self.close()
            self._connection = connection = http.client.HTTPConnection(host, port, timeout=timeout)
            connection.connect()
            self._socket = connection.sock  # the connection lets go of it when an answer is to be its last
        self._socket.settimeout(timeout)
        return connection

    def _check(self, answer: http.client.HTTPResponse, stream: Stream, at: int, count: int, proved: bool) -> None:
        """Raises SyncError where asking again would not help."""
        status, number, came = answer.status, stream.number, answer.headers.get("Content-Range")
        if status >= 500:
            seconds = answer.headers.get("Retry-After", "")
            raise _Later(status, max(float(seconds), FIRST_PAUSE_S) if seconds.isdecimal() else self._pause)
        if status == HTTPStatus.UNAUTHORIZED:
            why = f"version {number}: the sender does not know this channel's secret"
        elif status == HTTPStatus.GONE:
            why = f"version {number} was replaced by a later one after {at} of {stream.nbytes} bytes"
        elif status != (HTTPStatus.PARTIAL_CONTENT if count else HTTPStatus.OK):
            why = f"version {number}: {stream.location['url']} answers {status} {answer.reason}"
        elif count and came != f"bytes {at}-{at + count - 1}/{stream.nbytes}":
            # The head may be cut short: http.client takes the end of a connection for the end of a head.
            raise ConnectionError(f"the answer to bytes {at}-{at + count - 1}/{stream.nbytes} has {came}")
        elif not proved:
            why = f"version {number}: what answers at {stream.location['url']} does not have this channel's secret"
        else:
            return
        raise SyncError("transfer", NAME, why)

    def _wait(self, error: Exception, deadline: Deadline) -> None:
        end = time.monotonic() + (error.seconds if isinstance(error, _Later) else self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        try:
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, deadline.left))
        except DeadlineExceeded as late:
            raise late from error
