"""A TCP proxy that breaks connections, for tests of who must bear it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from headrace.sync.base import Stream


class FaultyProxy:
    """Between a receiver and a sender of streams. `cuts(n)` is how many bytes the n-th connection gives back before
    it is cut, None where it is not; `change` may alter what is given back."""

    def __init__(
        self,
        stream: Stream,
        cuts: Callable[[int], int | None] = lambda n: None,
        change: Callable[[bytes], bytes] = lambda data: data,
        reset: bool = False,
    ):
        url = urlsplit(stream.location["url"])
        self._behind, self._path = (url.hostname, url.port), url.path
        self._cuts, self._change, self._reset = cuts, change, reset
        self.connections = self.given = 0
        self._open: list[socket.socket] = []
        self._port = 0
        self.listen()

    def listen(self) -> None:
        """Begin, or begin again at the same address."""
        self._door = socket.create_server(("127.0.0.1", self._port))
        self._port = self._door.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._door,), daemon=True).start()

    def close(self) -> None:
        """Nobody is let in any more, and who is in is put out."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for connection in self._open:
            _shut(connection)

    def stream(self, stream: Stream) -> Stream:
        """The stream as it is to be had through the proxy."""
        return msgspec.structs.replace(stream, location={"url": f"http://127.0.0.1:{self._port}{self._path}"})

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                front, _ = door.accept()
            except OSError:
                return
            back = socket.create_connection(self._behind)
            self._open += [front, back]
            cut = self._cuts(self.connections)
            self.connections += 1
            threading.Thread(target=self._ask, args=(front, back), daemon=True).start()
            threading.Thread(target=self._give, args=(back, front, cut), daemon=True).start()

    def _ask(self, front: socket.socket, back: socket.socket) -> None:
        while data := _received(front):
            back.sendall(data)
        _shut(back)

    def _give(self, back: socket.socket, front: socket.socket, cut: int | None) -> None:
        given = 0
        while data := _received(back):
            if cut is not None:
                data = data[: cut - given]
            try:
                front.sendall(self._change(data))
            except OSError:
                break
            given += len(data)
            self.given += len(data)
            if given == cut:
                break
        if self._reset:
            front.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            front.shutdown(socket.SHUT_RD)  # or the other thread's read keeps it open
            front.close()
        _shut(front)
        _shut(back)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
