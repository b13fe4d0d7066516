"""Weights over HTTP, from the sender's memory.

    GET  /streams/<name>    Range: bytes=a-b      206, then those bytes as they are filled
    HEAD /streams/<name>                          200 while the stream is on offer

    401   without Authorization: Bearer <token>         404   no stream of this sender
    410   replaced by a later one                       416   these are no bytes of the stream
    503   the first of them are not filled yet: ask again

The memory is used again for the next stream. Bytes that were under way then may be of either, so a receiver asks
once more, when it has them all, whether the stream is still on offer. No name is used twice, by any sender.

The token keeps others from reading weights; what travels is not encrypted.
"""

from __future__ import annotations

import hmac
import http.client
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from headrace.errors import DeadlineExceeded, SyncError
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN

NAME = "http"
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
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")


# ── Sending ──────────────────────────────────────────────────────────────────────────────────────────────


class _Offer:
    """The stream on offer, for all threads."""

    def __init__(self) -> None:
        self._sender = secrets.token_hex(8)
        self._count = 0
        self._filled = 0
        self._changed = threading.Condition()
        self.current = (f"{self._sender}-0", memoryview(b""))
        """(name, bytes), replaced together."""

    def replace(self, view: memoryview) -> None:
        with self._changed:
            self._count, self._filled = self._count + 1, 0
            self.current = (f"{self._sender}-{self._count}", view)
            self._changed.notify_all()

    def advance(self, filled: int) -> None:
        with self._changed:
            self._filled = filled
            self._changed.notify_all()

    def wait(self, name: str, filled: int) -> bool:
        """Until so many bytes of this stream are there, or it is replaced: False where neither comes in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.current[0] != name or self._filled >= filled, HOLD_S)

    def fault(self, name: str) -> HTTPStatus | None:
        """Why this stream is not to be had."""
        if name == self.current[0]:
            return None
        return HTTPStatus.GONE if name.startswith(f"{self._sender}-") else HTTPStatus.NOT_FOUND


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "headrace", ""
    timeout = IDLE_S
    disable_nagle_algorithm = True
    server: _Server

    def do_HEAD(self) -> None:
        name, view = self.server.offer.current
        if self._asks_for(name):
            self._head(HTTPStatus.OK, {"Content-Length": str(len(view)), "ETag": f'"{name}"'})

    def do_GET(self) -> None:
        offer = self.server.offer
        name, view = offer.current
        if not self._asks_for(name):
            return
        first, last = self._range(len(view))
        if not 0 <= first <= last < len(view):
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, {"Content-Range": f"bytes */{len(view)}"})
        elif not offer.wait(name, min(first + SLICE_BYTES, last + 1)):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, {"Retry-After": "0"})
        elif fault := offer.fault(name):
            self._refuse(fault)
        else:
            headers = {"Content-Length": str(last + 1 - first), "ETag": f'"{name}"'}
            if "Range" in self.headers:
                headers["Content-Range"] = f"bytes {first}-{last}/{len(view)}"
            self._head(HTTPStatus.PARTIAL_CONTENT if "Range" in self.headers else HTTPStatus.OK, headers)
            self._send(name, view[: last + 1], first)

    def _send(self, name: str, view: memoryview, first: int) -> None:
        """The bytes from `first` on, as they are filled."""
        for at in range(first, len(view), SLICE_BYTES):
            offer, piece = self.server.offer, view[at : at + SLICE_BYTES]
            if not offer.wait(name, at + len(piece)) or offer.fault(name):
                self.close_connection = True  # an answer cut short: whoever asks again hears why
                return
            self.connection.sendall(piece)

    def log_message(self, format: str, *args: Any) -> None: ...

    def _asks_for(self, name: str) -> bool:
        """Whether the request is for the stream of this name, by somebody who may have it. Refused otherwise."""
        given = self.headers.get("Authorization", "").encode("latin-1")
        asked = self.path.removeprefix("/streams/")
        if not hmac.compare_digest(given, self.server.authorization):
            self._refuse(HTTPStatus.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
        elif asked != name:
            self._refuse(self.server.offer.fault(asked) or HTTPStatus.GONE)
        else:
            return True
        return False

    def _range(self, nbytes: int) -> tuple[int, int]:
        """(first, last), as asked for; (-1, -1) where it makes no sense."""
        text = self.headers.get("Range", "bytes=0-")
        if (found := _RANGE.fullmatch(text)) is None:
            return -1, -1
        return int(found[1]), min(int(found[2] or nbytes), nbytes - 1)

    def _refuse(self, status: HTTPStatus, headers: dict[str, str] | None = None) -> None:
        self._head(status, {"Content-Length": "0", **(headers or {})})

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class _Server(socketserver.ThreadingTCPServer):
    """A thread for each connection; `end` ends them all."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, token: str):
        self.offer = _Offer()
        self.authorization = f"Bearer {token}".encode("latin-1")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)
        self._accepting = threading.Thread(
            target=self.serve_forever, args=(0.1,), name="headrace-http", daemon=True
        )
        self._accepting.start()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if self.address_family == socket.AF_INET6 else f"http://{host!s}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        arguments = (request, client_address)
        thread = threading.Thread(
            target=self.process_request_thread, args=arguments, name="headrace-http-connection", daemon=True
        )
        with self._lock:
            self._connections[request] = thread
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """That a receiver went away is its own business; anything else is a bug, and shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def end(self) -> None:
        self.shutdown()
        self._accepting.join()
        self.server_close()
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


class HttpOutlet:
    name = NAME
    align = ALIGN
    keeps = False

    def __init__(self, host: str, port: int, token: str):
        try:
            self._server = _Server(host, port, token)
        except OSError as error:
            raise SyncError("announce", NAME, f"nothing can be served at {host}, port {port}: {error}") from error
        self._memory = torch.empty(0, dtype=torch.uint8)

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
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

    def __init__(self, token: str):
        self._authorization = f"Bearer {token}"
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
        headers = {"Authorization": self._authorization}
        if count:
            headers["Range"] = f"bytes={at}-{at + count - 1}"
        connection.request("GET" if count else "HEAD", url.path, headers=headers)
        answer = connection.getresponse()
        try:
            self._check(answer, stream, at, count)
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

    def _check(self, answer: http.client.HTTPResponse, stream: Stream, at: int, count: int) -> None:
        """Raises SyncError where asking again would not help."""
        status, number, came = answer.status, stream.number, answer.headers.get("Content-Range")
        if status >= 500:
            seconds = answer.headers.get("Retry-After", "")
            raise _Later(status, max(float(seconds), FIRST_PAUSE_S) if seconds.isdecimal() else self._pause)
        if status == HTTPStatus.UNAUTHORIZED:
            why = f"version {number}: the sender does not know this channel's token"
        elif status == HTTPStatus.GONE:
            why = f"version {number} was replaced by a later one after {at} of {stream.nbytes} bytes"
        elif status != (HTTPStatus.PARTIAL_CONTENT if count else HTTPStatus.OK):
            why = f"version {number}: {stream.location['url']} answers {status} {answer.reason}"
        elif count and came != f"bytes {at}-{at + count - 1}/{stream.nbytes}":
            # The head may be cut short: http.client takes the end of a connection for the end of a head.
            raise ConnectionError(f"the answer to bytes {at}-{at + count - 1}/{stream.nbytes} has {came}")
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
