"""Messages between the processes of a run: records over a stream socket, one encoding, both ends in this file.

    controller (asyncio)                         child (blocking, or asyncio)
    Peer ── Channel ══ socket ══ BlockingChannel ── the role's own loop
                              or Channel

A `Peer` is the controller's view of one child: its process, its channel, calls that await a reply, and the
moment it died. A child whose controller has gone ends itself at once, whatever it was doing.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from headrace import errors, records
from headrace.bounds import clip, described
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError, InputError, RecordError
from headrace.records import Record, message

_READ_BYTES = 1 << 20
_LAST_LINE_BYTES, _LAST_LINE_CHARACTERS = 8192, 500
"""Where a log's last line is looked for, and how much of it is quoted."""
SAY_EVERY_S = 10.0
_LAST_MESSAGES_S = 0.5


@message
class Failed(Record):
    """An error as data: a class of `headrace.errors` by name, and its arguments."""

    call: int
    error: str
    args: list[Any]


def error_to_record(call: int, error: BaseException) -> Failed:
    if isinstance(error, HeadraceError):
        plain = [a if isinstance(a, int | float | bool | None) else _text(a) for a in error.args]
        return Failed(call=call, error=type(error).__name__, args=plain)
    return Failed(call=call, error="HeadraceError", args=[described(error), None, None])


def _text(value: object) -> str:
    return clip(value if isinstance(value, str) else repr(value))


def error_from_record(failed: Failed) -> HeadraceError:
    cls = getattr(errors, failed.error, HeadraceError)
    return cls(*failed.args)


class FrameReader:
    """Cuts a byte stream into messages. Feed it what arrives; take the records that are whole."""

    def __init__(self, limit: int = records.MOST_BYTES) -> None:
        """A message that announces more than `limit` bytes is refused as soon as its prelude is there."""
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._buffer += data
        found, start = [], 0
        while len(self._buffer) - start >= records.PRELUDE_BYTES:
            end = start + records.PRELUDE_BYTES
            end += records.body_length(self._buffer[start:end], self._limit)
            if len(self._buffer) < end:
                break
            if start == 0 and end > len(data):
                # A message that came in pieces gets the buffer itself: it may be too large to be there twice.
                message, self._buffer = self._buffer, self._buffer[end:]
                del message[end:]
                found.append(records.decode(message))
                continue
            found.append(records.decode(bytes(memoryview(self._buffer)[start:end])))
            start = end
        del self._buffer[:start]
        return found


class Channel(asyncio.Protocol):
    """The asyncio end. Messages of one turn of the loop leave in one write."""

    def __init__(
        self,
        on_message: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
        limit: int = records.MOST_BYTES,
    ):
        """`on_lost` gets a RecordError where the other end sent what is no message, or one above `limit` bytes."""
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = FrameReader(limit)
        self._refused: RecordError | None = None
        self._outgoing: list[bytearray] = []
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_message: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
        limit: int = records.MOST_BYTES,
    ) -> Channel:
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(on_message, on_lost, limit), sock=sock)
        return channel

    def send(self, record: Any) -> None:
        self.send_encoded(records.encode(record))

    def send_encoded(self, data: bytearray) -> None:
        self._outgoing.append(data)
        if len(self._outgoing) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            found = self._reader.feed(data)
        except RecordError as error:
            self._refused = error
            assert self._transport is not None
            self._transport.abort()
            return
        for record in found:
            self._on_message(record)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._refused or exc)


class BlockingChannel:
    """The end of a child that computes: a thread reads into a queue, sending is done by the caller's thread.

    When the controller goes away without saying `Stop`, the process exits at once, even in mid-computation.
    """

    def __init__(self, sock: socket.socket, divert: Callable[[Any], bool] | None = None):
        """`divert` sees each message first, on the reading thread, and returns True for those it took."""
        self._sock = sock
        self._divert = divert
        self._incoming: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="headrace-read", daemon=True).start()

    def send(self, *messages: Any) -> None:
        data = b"".join([records.encode(record) for record in messages])
        with self._lock:
            self._sock.sendall(data)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; raises queue.Empty after `timeout` seconds."""
        return self._incoming.get(timeout=timeout)

    def receive_waiting(self) -> list[Any]:
        """All messages that have arrived, without waiting."""
        found = []
        try:
            while True:
                found.append(self._incoming.get_nowait())
        except queue.Empty:
            return found

    def _read(self) -> None:
        # Whatever ends the reading, a process that cannot hear must not go on.
        try:
            reader = FrameReader()
            while data := self._recv():
                for record in reader.feed(data):
                    if self._divert is None or not self._divert(record):
                        self._incoming.put(record)
        except Exception:
            traceback.print_exc()
        os._exit(ORPHANED)

    def _recv(self) -> bytes:
        try:
            return self._sock.recv(_READ_BYTES)
        except OSError:
            return b""


def settle_memory() -> None:
    """What this process has loaded by now stays until it ends, so the garbage collector need not look at it again.
    With torch that is 10 ms and more, every few messages, with the interpreter's lock held."""
    gc.collect()
    gc.freeze()


@message
class Notice(Record):
    """Something that happened in a child and answers no call: an event of the run."""

    kind: str
    fields: dict[str, Any]
    call: int = 0


ORPHANED = 71
"""Exit status of a child whose controller has gone."""


@message
class Begin(Record):
    """The first message a child gets: what its entry is called with."""

    options: dict[str, Any]


@message
class Stop(Record):
    """End, after what was asked before."""


class ChildProcess(Protocol):
    """What a Peer needs of a process."""

    pid: int
    on_end: Callable[[], None] | None
    """Called when it has ended, by those who notice that at once."""

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        ...

    def kill(self) -> None:
        """It and what it has started."""
        ...

    async def wait(self, seconds: float) -> int | None:
        """Its exit status, or None if it, or what it has started, has not ended within `seconds`."""
        ...


class Peer:
    """One child, seen from the controller. Calls are answered by a record with the same `call` number."""

    def __init__(
        self, name: str, process: ChildProcess, log: Path | None = None, max_message: int = records.MOST_BYTES
    ):
        """A child that sends a message of more than `max_message` bytes counts as dead, and is killed."""
        self.name = name
        self._max_message = max_message
        self.process = process
        self._log = log
        self.on_message: Callable[[Any], None] | None = None
        """Gets messages that answer no call."""
        self.died: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()
        """Set, with the error to raise, when the child ends without having been asked to."""
        self._channel: Channel | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._last_said: InputError | None = None
        """Why it ends, where that is a fault of the user's folder."""
        self._mourned = False
        process.on_end = self._ended

    async def connect(self, sock: socket.socket) -> None:
        self._channel = await Channel.open(sock, self._received, self._lost, self._max_message)

    def next_call(self) -> int:
        return next(self._numbers)

    @property
    def stopping(self) -> bool:
        """Whether its end is the controller's doing."""
        return self._stopping

    def tell(self, record: Any) -> None:
        """Send without waiting. Raises when the child has died or was closed."""
        if self.died.cancelled():
            raise ComponentDied(self.name, "it was closed")
        if self.died.done():
            raise self.died.result()
        assert self._channel is not None
        self._channel.send(record)

    async def call(self, record: Any, *, deadline_s: float | None = None, look_at: str = "") -> Any:
        """Send a record that has a `call` number from `next_call`, and await its answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[record.call] = future
        try:
            self.tell(record)
            if deadline_s is None:
                return await future
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            what = f"{self.name} to answer {type(record).__name__}"
            assert deadline_s is not None
            raise DeadlineExceeded(
                "the controller", what, deadline_s, look_at or f"process {self.process.pid}"
            ) from None
        finally:
            self._waiting.pop(record.call, None)

    async def close(self, seconds: float) -> None:
        """Ask it to end; kill it when it has not within `seconds`."""
        self._stopping = True
        if self._channel is not None and not self.died.done():
            self._channel.send(Stop())
        if await self.process.wait(seconds) is None:
            await self.kill()
        if self._channel is not None:
            self._channel.close()

    async def kill(self) -> None:
        self._stopping = True
        self.process.kill()
        await self.process.wait(5.0)
        if self._channel is not None:
            self._channel.close()

    def _received(self, record: Any) -> None:
        future = self._waiting.get(getattr(record, "call", 0))
        if future is None:
            if isinstance(record, Failed) and isinstance(found := error_from_record(record), InputError):
                self._last_said = found
            if self.on_message is not None and not isinstance(record, Failed):
                self.on_message(record)
        elif not future.done():
            if isinstance(record, Failed):
                future.set_exception(error_from_record(record))
            else:
                future.set_result(record)

    def remove_log(self) -> None:
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def last_line(self) -> str:
        """Of its log, looked for at the log's end only; empty if there is none."""
        if self._log is None or not self._log.is_file():
            return ""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_LINE_BYTES))
            lines = log.read(_LAST_LINE_BYTES).decode(errors="replace").strip().splitlines()
        return clip(lines[-1], _LAST_LINE_CHARACTERS) if lines else ""

    def _last_words(self) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        line = self.last_line()
        return f"its last words in {self._log}: {line}" if line else f"it said nothing in {self._log}"

    def _lost(self, exc: Exception | None) -> None:
        if not self.died.done() and not self._mourned:
            self._mourned = True
            asyncio.get_running_loop().create_task(self._mourn(exc))

    def _ended(self) -> None:
        """What it has forked may hold its connection. What it has sent before is still to be read."""
        loop = self.died.get_loop()
        if not loop.is_closed():
            loop.call_later(_LAST_MESSAGES_S, self._lost, None)

    async def _exit_status(self, seconds: float) -> int | None:
        """Its own, whatever becomes of what it has started."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while (status := self.process.poll()) is None and clock() < end:
            await asyncio.sleep(0.005)
        return status

    async def _mourn(self, exc: Exception | None) -> None:
        if isinstance(exc, RecordError):
            self.process.kill()
        status = await self._exit_status(5.0)
        how = "it closed its connection" if status is None else _exit_words(status)
        if status is None:
            # Nobody can talk to it any more.
            self.process.kill()
            await self.process.wait(5.0)
        if isinstance(exc, RecordError):
            how = f"it was killed, for what it sent: {exc}"
        error = self._last_said or ComponentDied(self.name, how, await asyncio.to_thread(self._last_words))
        if self._channel is not None:
            self._channel.close()
        if self.died.done():
            return
        if self._stopping and not self._waiting:
            self.died.cancel()
            return
        self.died.set_result(error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


@asynccontextmanager
async def telling(
    say: Callable[[str], None] | None, what: str, more: Callable[[], str] = lambda: ""
) -> AsyncIterator[None]:
    """Meanwhile, `say` now and then for how long, and whatever `more` there is to tell. What either raises is not
    raised here."""

    async def tell() -> None:
        clock = asyncio.get_running_loop().time
        begun = clock()
        while say is not None:
            await asyncio.sleep(SAY_EVERY_S)
            details = await asyncio.to_thread(more)
            say(f"{what} for {clock() - begun:.0f} s. {details}".rstrip())

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()


def _exit_words(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
