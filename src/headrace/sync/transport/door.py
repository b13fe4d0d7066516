"""A listening socket at which strangers may knock: what one of them can cost is bounded.

    accept ─▶ a stranger: one descriptor, a few KiB, a few seconds ─▶ it proves itself ─▶ admitted
                                                                  └▶ one refused connection, a line in the log

One thread looks after all strangers, whatever their number. At most STRANGERS are there at a time: of more, the one
that has waited longest is sent away for the newest, which an honest caller hardly notices, since it proves itself
within a round trip and `accept` slows down in a crowd. Where the process has no descriptor left, `accept` pauses.
What happens to a connection after it was admitted is for the transport to bound.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

LOG = logging.getLogger(__name__)

STRANGERS = 64
"""Connections that have not proved themselves yet."""
PROOF_S = 5.0
"""A stranger has so long, from its connection to the last byte of its proof."""
CROWD = STRANGERS // 2
"""With more strangers than this one more is accepted only every CROWD_PAUSE_S, so that each has time."""
CROWD_PAUSE_S = 2e-3
SHORT_OF_DESCRIPTORS_S = 0.5
"""`accept` pauses so long where the process, or the machine, has no descriptor or no memory for one more."""
LOG_S = 10.0
"""Refusals are logged once in so long, with their number."""
READ_BYTES = 4096
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RefusedError(Exception):
    """A stranger is sent away. `answer` is what it is told."""

    def __init__(self, why: str, answer: bytes = b""):
        super().__init__(why)
        self.answer = answer


class Visit(Protocol):
    """What one stranger has said so far. It keeps at most a few KiB."""

    greeting: bytes
    """Sent before the stranger has said anything."""

    def receive(self, data: bytes) -> Any | None:
        """What has been proved with these further bytes, or None while some are missing. Raises RefusedError."""
        ...


class Door:
    """Listens at one address until it is closed. `meet` makes a Visit; `admit` gets the connection, which is
    blocking again and the callee's from then on, with the Visit and what was proved. `admit` runs on the door's
    thread: it must be quick, and may raise RefusedError or OSError."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        name: str,
        meet: Callable[[], Visit],
        admit: Callable[[socket.socket, Any, Any], None],
    ):
        """Raises OSError where nothing can listen at that address. `name` is the thread's."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=128)
        self._listening.setblocking(False)
        self.host, self.port = self._listening.getsockname()[:2]
        self.six = family == socket.AF_INET6
        self._meet, self._admit = meet, admit
        self._strangers: dict[socket.socket, tuple[Visit, float]] = {}
        """Oldest first, with the time by which each has to be done."""
        self._refusals = _Refusals(f"{self.host} port {self.port}")
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._accepts_from = 0.0
        """`accept` pauses until then."""
        self._accepting = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody is admitted any more when this has returned."""
        if not self._closing:
            self._closing = True
            self._wakes.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._next_look()):
                    if key.fileobj is self._listening:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._strangers:
                        self._hear(key.fileobj)
                self._send_away_the_late()
        finally:
            for stranger in list(self._strangers):
                self._forget(stranger).close()
            self._selector.close()
            for own in (self._listening, self._wakes, self._woken):
                own.close()
            self._refusals.tell()

    def _next_look(self) -> float | None:
        """Seconds until something is due although nothing comes."""
        now = time.monotonic()
        accepts = now >= self._accepts_from
        if accepts != self._accepting:
            self._accepting = accepts
            if accepts:
                self._selector.register(self._listening, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listening)
        due = [end for _, end in list(self._strangers.values())[:1]]
        if not accepts:
            due.append(self._accepts_from)
        return max(0.0, min(due) - now) if due else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._accepts_from = time.monotonic() + SHORT_OF_DESCRIPTORS_S
                self._refusals.count(f"accept pauses: {error.strerror}")
            return  # what called has gone again
        if len(self._strangers) >= STRANGERS:
            self._refuse(next(iter(self._strangers)), RefusedError(f"{STRANGERS} others came after it"))
        if len(self._strangers) >= CROWD:
            self._accepts_from = time.monotonic() + CROWD_PAUSE_S
        connection.setblocking(False)
        visit = self._meet()
        self._strangers[connection] = (visit, time.monotonic() + PROOF_S)
        self._selector.register(connection, selectors.EVENT_READ)
        if visit.greeting and not _sent(connection, visit.greeting):
            self._refuse(connection, RefusedError("it takes no greeting"))

    def _hear(self, stranger: socket.socket) -> None:
        visit, _ = self._strangers[stranger]
        try:
            data = stranger.recv(READ_BYTES)
            if not data:
                raise RefusedError("it went away without a proof")
            proved = visit.receive(data)
            if proved is None:
                return
            self._forget(stranger).setblocking(True)
            self._admit(stranger, visit, proved)
        except BlockingIOError:
            return
        except RefusedError as error:
            self._refuse(stranger, error)
        except OSError as error:
            self._refuse(stranger, RefusedError(error.strerror or type(error).__name__))

    def _send_away_the_late(self) -> None:
        now = time.monotonic()
        late = [stranger for stranger, (_, end) in self._strangers.items() if end <= now]
        for stranger in late:
            self._refuse(stranger, RefusedError(f"no proof within {PROOF_S:.0f} s"))

    def _refuse(self, stranger: socket.socket, error: RefusedError) -> None:
        self._forget(stranger)
        stranger.setblocking(False)
        if error.answer:
            _sent(stranger, error.answer)
        self._refusals.count(str(error))
        stranger.close()

    def _forget(self, stranger: socket.socket) -> socket.socket:
        if self._strangers.pop(stranger, None) is not None:
            self._selector.unregister(stranger)
        return stranger


def _sent(connection: socket.socket, data: bytes) -> bool:
    """Whether the system has taken it all at once, as it does with a few hundred bytes."""
    try:
        return connection.send(data) == len(data)
    except OSError:
        return False


class _Refusals:
    """A line in the log at first, and later at most one in LOG_S."""

    def __init__(self, where: str):
        self._where = where
        self._count = 0
        self._last = ""
        self._next = 0.0

    def count(self, why: str) -> None:
        self._count, self._last = self._count + 1, why
        if time.monotonic() >= self._next:
            self.tell()

    def tell(self) -> None:
        if self._count:
            LOG.warning("connections refused at %s: %d; the last: %s", self._where, self._count, self._last)
            self._count, self._next = 0, time.monotonic() + LOG_S
