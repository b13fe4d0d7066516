"""Groups of processes of a transport's own: broadcasts from rank 0 to the others.

    SocketGroup   host memory, over the connections of a meeting. Between rank 0 and each other rank lie several,
                  which broadcasts take in turn
    NcclGroup     device memory

The default group of torch.distributed and `init_process_group` are not used. Members meet as meeting.py says.

A group in which anything failed is broken for good. `abort` ends what is under way, here and at the other members:
when it has returned nothing is read from or written to the memory that was given to the group any more.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.sync.transport.meeting import Lanes

T = TypeVar("T")

FORMING_S = 10.0
"""Longest that making a group takes once all members are there. A member may die in between."""
_ABORTED_S = 5.0
"""What was under way ends within this time of an abort; it takes milliseconds."""
_POLL_S = (5e-5, 2e-3)
_NEVER_S = 24 * 3600.0
_ID_KEY = "0"
"""Under which rank 0 leaves the id of its first communicator in its store."""
_ID_BYTES = 4096
"""The id has 128; more than this is none."""


class Group(ABC):
    """Broadcasts from rank 0, finished in the order they were begun. Errors are RuntimeError.

    `abort` may be called from any thread, the rest from one.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.broken = False
        self._works: deque[Any] = deque()
        self._posting = threading.Lock()

    @property
    def in_flight(self) -> int:
        return len(self._works)

    def begin(self, tensor: Tensor, seconds: float) -> None:
        """Send it (rank 0) or receive into it. It must be left alone until this has finished."""
        with self._posting:
            if self.broken:
                raise RuntimeError("the group was abandoned")
            self._works.append(self._post(tensor, seconds))

    def finish(self, seconds: float) -> None:
        """Wait for the broadcast that was begun first of those under way."""
        try:
            self._wait(self._works[0], seconds)
        except RuntimeError:
            self.abort()
            raise
        self._works.popleft()

    @abstractmethod
    def conclude(self, seconds: float) -> None:
        """With nothing under way: rank 0 waits until every other has taken all that was sent and concluded too."""

    def abort(self) -> None:
        with self._posting:
            if not self.broken:
                self.broken = True
                self._break()
        for work in list(self._works):
            with suppress(RuntimeError):
                self._settle(work, _ABORTED_S)

    @abstractmethod
    def close(self) -> None:
        """Leave it, with nothing under way."""

    @abstractmethod
    def _post(self, tensor: Tensor, seconds: float) -> Any: ...

    @abstractmethod
    def _wait(self, work: Any, seconds: float) -> None: ...

    @abstractmethod
    def _settle(self, work: Any, seconds: float) -> None:
        """Wait until its memory is left alone, after `_break`."""

    @abstractmethod
    def _break(self) -> None: ...


# ── Over connections ─────────────────────────────────────────────────────────────────────────────────────


class SocketGroup(Group):
    def __init__(self, rank: int, size: int, lanes: Lanes):
        """`lanes` are rank 0's connections to each of the others, or another's to rank 0 alone. They are the
        group's from now on."""
        super().__init__(rank, size)
        self._move, self._move_back = (_send, _receive) if rank == 0 else (_receive, _send)
        self._peers = [[_Connection(one) for one in lanes_of_peer] for lanes_of_peer in lanes]
        self._turn = 0

    def conclude(self, seconds: float) -> None:
        # Sent is what the system has taken: of a small stream all, before anybody has asked for it.
        with self._posting:
            if self.broken:
                raise RuntimeError("the group was abandoned")
            work = _Work(len(self._peers))
            for lanes in self._peers:
                lanes[0].begin(self._move_back, memoryview(bytearray(1)), work)
            self._works.append(work)
        self.finish(seconds)

    def close(self) -> None:
        with self._posting:
            self.broken = True
            self._break()

    def _post(self, tensor: Tensor, seconds: float) -> _Work:
        work = _Work(len(self._peers))
        view = tensor.numpy().data.cast("B") if tensor.numel() else memoryview(b"")
        for lanes in self._peers:
            lanes[self._turn % len(lanes)].begin(self._move, view, work)
        self._turn += 1
        return work

    def _wait(self, work: _Work, seconds: float) -> None:
        work.wait(seconds)

    def _settle(self, work: _Work, seconds: float) -> None:
        work.settle(seconds)

    def _break(self) -> None:
        for lanes in self._peers:
            for connection in lanes:
                connection.end()


class _Work:
    """One broadcast, which is over when it is with every peer."""

    def __init__(self, peers: int):
        self._changed = threading.Condition()
        self._left = peers
        self._error: Exception | None = None

    def done(self, error: Exception | None = None) -> None:
        with self._changed:
            self._left -= 1
            self._error = self._error or error
            if self._left == 0 or error is not None:
                self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Raises RuntimeError as soon as it has failed anywhere."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._left == 0 or self._error is not None, seconds)
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        if not ended:
            raise RuntimeError(f"Timed out: a broadcast took longer than {seconds:.1f} s")

    def settle(self, seconds: float) -> None:
        """Wait until nothing touches its memory any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0, seconds)


_Move = Callable[[socket.socket, memoryview], None]


class _Connection:
    """A connection and the thread that moves bytes over it, one broadcast after the other."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        # Not for the limit's sake, `abort` ends every wait. But with one the system is asked for what it has at
        # once and then waited for, which takes far less of the processor than waiting within the transfer.
        connection.settimeout(_NEVER_S)
        self._queue: SimpleQueue[tuple[_Move, memoryview, _Work] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="headrace-lane", daemon=True).start()

    def begin(self, move: _Move, view: memoryview, work: _Work) -> None:
        self._queue.put((move, view, work))

    def end(self) -> None:
        """Whatever is under way fails at once, here and at the other end."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._queue.put(None)

    def _run(self) -> None:
        failed: OSError | None = None
        # None comes last: who is not to begin any more has set the group's `broken`.
        while (given := self._queue.get()) is not None:
            move, view, work = given
            try:
                if failed is not None:
                    raise failed
                move(self._connection, view)
            except OSError as error:
                failed = error
            work.done(failed)
            del given, view, work  # while it waits it holds nobody's memory
        self._connection.close()


def _send(connection: socket.socket, view: memoryview) -> None:
    try:
        connection.sendall(view)
    except (ConnectionError, BrokenPipeError):
        raise ConnectionError("Connection closed by peer") from None


def _receive(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            count = connection.recv_into(view[done:])
        except ConnectionError:
            count = 0
        if count == 0:
            raise ConnectionError("Connection closed by peer")
        done += count


# ── NCCL ─────────────────────────────────────────────────────────────────────────────────────────────────


class NcclGroup(Group):
    """Run with one rank, as far as that goes (tests/gpu/test_collective_nccl.py). What remains for two GPUs: that
    `abort` ends a broadcast whose peer has died or stopped, that the memory is not written after it, how long it
    takes; that a watchdog which handles no errors leaves the process alone then; how large a bucket should be."""

    def __init__(self, rank: int, size: int, connections: Sequence[socket.socket], *, device: torch.device):
        """`connections` are those of a meeting: to every other rank, or to rank 0. The id of the communicator goes
        over them, and they are closed."""
        super().__init__(rank, size)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # Waits are bounded here, by polling; the watchdog's own limit would end the process.
        options._timeout = timedelta(days=365)
        # Each process has a store of its own: torch's TCPStore serves whoever connects, without proof or limits.
        store = dist.HashStore()
        if rank == 0:
            start_thread(lambda: hand_out_id(store, connections), "headrace-nccl-id")
        else:
            # Bytes are kept as they are; the stubs know only text, which would be encoded.
            store.set(_ID_KEY, take_id(connections[0]))  # type: ignore[arg-type]
        with _watchdog_that_handles_no_errors():
            self._group = nccl(store, rank, size, options)
        self._group.eager_connect_single_device(device)

    def conclude(self, seconds: float) -> None:
        """A broadcast that has ended at rank 0 has been taken: nothing lies between the two."""

    def close(self) -> None:
        # An orderly end would wait for the other members.
        self.abort()

    def _post(self, tensor: Tensor, seconds: float) -> Any:
        # On a stream of its own, which waits for the current one: a receiver's copies out of the buffer come first.
        return self._group.broadcast([tensor], _from_rank_0(seconds))

    def _wait(self, work: Any, seconds: float) -> None:
        end, pause = time.monotonic() + seconds, _POLL_S[0]
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"a broadcast took longer than {seconds:.1f} s")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])
        # An operation that was aborted is completed too.
        if self.broken:
            raise RuntimeError("the group was abandoned")
        work.wait()

    def _settle(self, work: Any, seconds: float) -> None:
        self._wait(work, seconds)

    def _break(self) -> None:
        self._group.abort()


_LENGTH = struct.Struct("<I")


def hand_out_id(store: dist.Store, connections: Sequence[socket.socket]) -> None:
    """Rank 0's side: the others need its communicator's id, in which NCCL has put its address and a random number.
    It is in the store before NCCL waits for them."""
    try:
        store.wait([_ID_KEY], timedelta(seconds=FORMING_S))
        value = store.get(_ID_KEY)
        for connection in connections:
            connection.sendall(_LENGTH.pack(len(value)) + value)
    except (RuntimeError, OSError):
        return  # the others are told by their closed connections
    finally:
        for connection in connections:
            connection.close()


def take_id(connection: socket.socket) -> bytes:
    """Another rank's side. Raises RuntimeError where none comes."""
    connection.settimeout(FORMING_S)
    with connection:
        try:
            length = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
            if length > _ID_BYTES:
                raise RuntimeError(f"an id of {length} bytes is none")
            return _exactly(connection, length)
        except OSError as error:
            raise RuntimeError(f"the sender gave no id: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive(connection, memoryview(data))
    return bytes(data)


# ── Threads and waits ────────────────────────────────────────────────────────────────────────────────────


def within(seconds: float, work: Callable[[], T], discard: Callable[[T], None]) -> T:
    """What `work` returns or raises. NCCL waits for ever for a process that was stopped, so it is done in a thread,
    which is left behind after `seconds` with TimeoutError; what it still returns is discarded."""
    lock = threading.Lock()
    done = threading.Event()
    outcome: list[Any] = []
    late = False

    def run() -> None:
        try:
            found: Any = (True, work())
        except BaseException as error:
            found = (False, error)
        with lock:
            outcome.append(found)
            if late and found[0]:
                discard(found[1])
        done.set()

    start_thread(run, "headrace-join")
    done.wait(seconds)
    with lock:
        late = not outcome
    if late:
        raise TimeoutError(f"not within {seconds:.1f} s")
    succeeded, value = outcome[0]
    if not succeeded:
        raise value
    result: T = value
    return result


def start_thread(run: Callable[[], None], name: str, stop: Callable[[], None] = lambda: None) -> threading.Thread:
    """A thread that does not keep the process alive. When the interpreter ends it is told to stop and has a little
    time for it: one that was within torch's code when it is taken away would end the process with an abort."""

    def run_and_forget() -> None:
        try:
            run()
        finally:
            _running.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run_and_forget, name=name, daemon=True)
    _running[thread] = stop
    thread.start()
    return thread


_running: dict[threading.Thread, Callable[[], None]] = {}


@atexit.register
def _stop_threads() -> None:
    end = time.monotonic() + FORMING_S + _ABORTED_S
    for stop in list(_running.values()):
        stop()
    for thread in list(_running):
        thread.join(max(0.0, end - time.monotonic()))


def on_own_stream(device: torch.device) -> AbstractContextManager[object]:
    """For a thread that must not wait for what others do on the device."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def reason(error: BaseException) -> str:
    """What torch's error says, without the source line before it and the C++ stack behind it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". ")[0]


def _from_rank_0(seconds: float) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout, options.asyncOp = 0, _interval(seconds), True
    return options


def _interval(seconds: float) -> timedelta:
    """Zero would be read as no limit."""
    return timedelta(milliseconds=max(1, round(1e3 * seconds)))


@contextmanager
def _watchdog_that_handles_no_errors() -> Iterator[None]:
    """Unless told otherwise torch ends the process when a peer has died. A group reads that from the environment,
    and nowhere else, when it is made; a trainer's own groups are made with whatever was set before."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


_ENVIRONMENT = threading.Lock()
