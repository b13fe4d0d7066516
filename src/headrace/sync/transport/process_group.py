"""Process groups of a transport's own, beside whatever groups a trainer has: broadcasts from rank 0 to the others.

    gloo   host memory, over TCP. Between each two ranks lie several connections, which buckets take in turn
    nccl   device memory

The default group and `init_process_group` are not used. Members meet at a store that rank 0 serves:

    sender                                  a receiver, rank r
    waits for every `taken/r`               counts `taken/r` up: the rank is its own if it was the first
    `state` = form, or abandoned            waits for `state`
    ─────────────────────── both make the group, which takes milliseconds ───────────────────────

A group in which anything failed is broken for good. `abort` ends what is under way, here and at the other members:
when it has returned nothing is read from or written to the memory that was given to the group any more.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

FORMING_S = 10.0
"""Longest that making a group takes once all members are there. A member may die in between."""
_ABORTED_S = 5.0
"""What was under way ends within this time of an abort; it takes milliseconds."""
_POLL_S = (5e-5, 2e-3)
BUFFERS = {socket.SO_SNDBUF: 256 << 10, socket.SO_RCVBUF: 1 << 20}
"""Bytes, of a connection within a machine; the system doubles them."""


class Group(ABC):
    """Broadcasts from rank 0, finished in the order they were begun. Errors are torch's: RuntimeError.

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

    def abort(self) -> None:
        with self._posting:
            if not self.broken:
                self.broken = True
                self._break()
        for work in list(self._works):
            with suppress(RuntimeError):
                self._wait(work, _ABORTED_S)

    @abstractmethod
    def close(self) -> None:
        """Leave it, with nothing under way."""

    @abstractmethod
    def _post(self, tensor: Tensor, seconds: float) -> Any: ...

    @abstractmethod
    def _wait(self, work: Any, seconds: float) -> None: ...

    @abstractmethod
    def _break(self) -> None: ...


class GlooGroup(Group):
    def __init__(
        self, store: dist.Store, rank: int, size: int, *, address: str, lanes: int, at_once: int, seconds: float
    ):
        """`address` is this machine's own, at which the other members reach it. At most `at_once` broadcasts are
        begun and not finished."""
        super().__init__(rank, size)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        # Broadcasts take devices in turn, and each has its own thread and connections.
        options._devices = [gloo.create_device(hostname=address) for _ in range(lanes)]
        options._threads = at_once
        options._timeout = _interval(min(seconds, FORMING_S))
        self._lanes = lanes
        before = sockets()
        self._group = gloo(store, rank, size, options)
        _buffer_little(descriptor for name, descriptor in sockets().items() if name not in before)

    def _post(self, tensor: Tensor, seconds: float) -> Any:
        return self._group.broadcast([tensor], _from_rank_0(seconds))

    def _wait(self, work: Any, seconds: float) -> None:
        work.wait(_interval(seconds))

    def _break(self) -> None:
        # Gloo has no abort. But an operation that outlasts its time closes all connections of its lane, which ends
        # every other operation there, and the peers' too. What is received here is sent by nobody.
        for lane in range(self._lanes):
            for peer in range(self.size):
                if peer != self.rank:
                    with suppress(RuntimeError):
                        self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, lane).wait(_interval(1e-3))

    def close(self) -> None:
        """Its connections end with it."""


class NcclGroup(Group):
    """Run with one rank, as far as that goes (tests/gpu/test_collective_nccl.py). What remains for two GPUs: that
    `abort` ends a broadcast whose peer has died or stopped, that the memory is not written after it, how long it
    takes; that a watchdog which handles no errors leaves the process alone then; how large a bucket should be."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, device: torch.device):
        super().__init__(rank, size)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # Waits are bounded here, by polling; the watchdog's own limit would end the process.
        options._timeout = timedelta(days=365)
        with _watchdog_that_handles_no_errors():
            self._group = nccl(store, rank, size, options)
        self._group.eager_connect_single_device(device)

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

    def _break(self) -> None:
        self._group.abort()


def sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by the system's names of these: numbers are given out again, also
    while a group is made. Empty where the system does not tell."""
    found = {}
    with suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found[name] = int(number)
    return found


def _buffer_little(descriptors: Iterable[int]) -> None:
    """Of those that connect this machine with itself: what one end writes the other shall find in the processor's
    cache. Left alone, the system lets more be under way than that holds, and every byte goes to memory and back."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[0] == connection.getsockname()[0]:
                for buffer, size in BUFFERS.items():
                    connection.setsockopt(socket.SOL_SOCKET, buffer, size)


# ── Meeting ──────────────────────────────────────────────────────────────────────────────────────────────


def serve(host: str, seconds: float) -> dist.Store:
    """A store at a port of `host` that was free; alone there, where torch's own listens at every address."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_interval(seconds),
        master_listen_fd=listening.detach(),
    )


def connect(host: str, port: int, group: int, seconds: float) -> dist.Store:
    """The part of the store that belongs to one group, over a connection of its own: while one thread waits for a
    key, others cannot use the same connection."""
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_interval(seconds))
    return dist.PrefixStore(str(group), store)


def gather(store: dist.Store, size: int, seconds: float, given_up: Callable[[], bool]) -> bool:
    """Rank 0's side: wait until the other ranks are taken, then let all make the group. False when `given_up` says
    so first. Raises RuntimeError after `seconds`."""
    end, pause = time.monotonic() + seconds, _POLL_S[0]
    ranks = [f"taken/{rank}" for rank in range(1, size)]
    while ranks and not store.check(ranks):
        if given_up():
            return False
        if time.monotonic() > end:
            raise RuntimeError(f"not all of {size - 1} receivers came within {seconds:.1f} s")
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    store.set("state", "form")
    return True


def dismiss(store: dist.Store) -> None:
    """Rank 0's side: whoever comes now is told at once that the group is no more."""
    store.set("state", "abandoned")


def attend(store: dist.Store, rank: int) -> None:
    """A receiver's side: take the rank and wait for the others. Raises RuntimeError where that is not to be."""
    if store.add(f"taken/{rank}", 1) > 1:
        raise RuntimeError(f"rank {rank} is taken: this engine was in the group before it was started again")
    if store.get("state") != b"form":
        raise RuntimeError("the sender has given it up")


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
    return address


def within(seconds: float, work: Callable[[], T], discard: Callable[[T], None]) -> T:
    """What `work` returns or raises. Torch's store waits for ever for a process that was stopped, so it is done in
    a thread, which is left behind after `seconds` with TimeoutError; what it still returns is discarded."""
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
