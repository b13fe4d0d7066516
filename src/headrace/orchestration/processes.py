"""Starting child processes on this machine and connecting to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace import records
from headrace.errors import ComponentDied, DeadlineExceeded
from headrace.ipc import Begin, Peer, telling
from headrace.orchestration.keeper import MARK, end_marked, order, send_signal
from headrace.orchestration.keeper import __file__ as keeper_file

CHILD = "HEADRACE_CHILD"
"""Set in the environment of every child, to its name."""


KEEPER_GRACE_S = 10.0
"""Longest that a keeper may take, once its child was killed, until its family is killed without it."""
_START_S = 60.0


class LocalProcess:
    """A child process under its keeper (keeper.py), waited for without blocking the event loop."""

    def __init__(self, keeper: subprocess.Popen[bytes], control: socket.socket, mark: str):
        self.pid = 0
        """The child's, not its keeper's. 0 until it has started."""
        self._keeper = keeper
        self._control = control
        self._mark = mark
        self._said = b""
        self._status: int | None = None
        self._cleared = False
        """Whether the keeper has said so."""
        self._closed = False
        """Whether the control socket is at its end."""
        self._force: asyncio.TimerHandle | None = None
        self.on_end: Callable[[], None] | None = None
        control.setblocking(False)
        self._loop = asyncio.get_running_loop()
        # A keeper that was killed is noticed at once, though what its child had started holds the child's socket.
        self._loop.add_reader(control, self._hear)

    async def started(self) -> None:
        """Until `pid` is known. Raises OSError when the keeper did not start the child; the log has the reason."""
        end = self._loop.time() + _START_S
        while not self.pid and not self._closed and self._loop.time() < end:
            await asyncio.sleep(0.002)
        if not self.pid:
            raise OSError(f"its keeper did not start it within {_START_S:g} s, or ended")

    def poll(self) -> int | None:
        """The child's exit status, as soon as it has ended."""
        self._hear()
        return self._status

    def kill(self) -> None:
        """The child and all that it has started."""
        if self.poll() is None and self.pid:
            send_signal(self.pid, signal.SIGKILL)
        if not self._closed:
            # A keeper that users' code has stopped would not hear of it.
            send_signal(self._keeper.pid, signal.SIGCONT)
            with contextlib.suppress(OSError):
                self._control.send(b".")
            if self._force is None and not self._loop.is_closed():
                # The keeper's end is heard of, and does the rest.
                self._force = self._loop.call_later(KEEPER_GRACE_S, self._keeper.kill)

    async def wait(self, seconds: float) -> int | None:
        """The child's exit status, once all that it had started has ended too, and its keeper."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while not (ended := self._has_ended()) and clock() < end:
            await asyncio.sleep(0.005)
        return self._status if ended else None

    def _has_ended(self) -> bool:
        self._hear()
        return self._closed and self._keeper.poll() is not None

    def _hear(self) -> None:
        """What the keeper has said by now."""
        while not self._closed:
            try:
                data = self._control.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close()
                return
            *lines, self._said = (self._said + data).split(b"\n")
            for what, _, number in (line.partition(b" ") for line in lines):
                if what == b"pid":
                    self.pid = int(number)
                elif what == b"ended":
                    self._end(int(number))
                else:
                    self._cleared = True

    def _close(self) -> None:
        """The keeper has ended. If it was killed, its child died with it; what that had started is found by its
        group and by its mark."""
        self._closed = True
        if self._force is not None:
            self._force.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._control.close()
        if not self._cleared:
            if self.pid and self._status is None:
                send_signal(self.pid, signal.SIGKILL, group=True)
            threading.Thread(target=end_marked, args=(self._mark,), daemon=True).start()
        if self._status is None:
            self._end(-signal.SIGKILL)

    def _end(self, status: int) -> None:
        self._status = status
        if self.on_end is not None:
            self.on_end()


def compute_threads(*, take_turns: bool = False) -> int:
    """Of the trainer, and of all engines together: half of the cores each, all of them where the two take turns.

    Of eight cores or more at least every eighth is left for all else: messages, environments, publication. A thread
    of theirs on a core that computes keeps the whole team of it waiting.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores -= cores // 8
    return max(1, cores if take_turns else cores // 2)


async def spawn(
    name: str,
    entry: str,
    options: dict[str, Any],
    *,
    logs: Path,
    fds: Sequence[int] = (),
    threads: int = 1,
    environment: Mapping[str, str] | None = None,
    niceness: int = 0,
    max_message: int = records.MOST_BYTES,
) -> Peer:
    """Start `entry` ("module:function") in a process of its own, with inherited descriptors `fds`.

    What it prints goes to logs/NAME.log, whose size is bounded. It has a session of its own: Ctrl-C reaches the
    controller alone. `environment` is the part of the environment it gets (None: all), `niceness` by how much its
    priority is lower, `max_message` the bytes of the largest message it may send. What it has started ends with it.
    """
    ours, theirs = socket.socketpair()
    control, keepers_end = socket.socketpair()
    mark = secrets.token_hex(16)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    command = [sys.executable, "-m", "headrace.orchestration.child", name, entry, str(theirs.fileno())]
    inherited = [theirs.fileno(), *fds]
    with log.open("ab") as errors:
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper_file, str(keepers_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[keepers_end.fileno(), *inherited],
            env={
                **(os.environ if environment is None else environment),
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                # So that what this process can import, a module beside its script say, the child can.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and Path(path).is_dir()),
                CHILD: name,
                MARK: mark,
            },
            start_new_session=True,
        )
    theirs.close()
    keepers_end.close()
    process = LocalProcess(keeper, control, mark)
    peer = Peer(name, process, log, max_message)
    try:
        control.sendall(order(command, log=str(log), niceness=niceness, fds=inherited))
        ours.sendall(records.encode(Begin(options=options)))
        ours.setblocking(False)
        await process.started()
        await peer.connect(ours)
    except BaseException as error:
        process.kill()
        ours.close()
        if isinstance(error, OSError):
            raise ComponentDied(name, f"it could not be started: {error}", f"look at {log}") from error
        raise
    return peer


Ready = TypeVar("Ready")


async def ready(peer: Peer, kind: type[Ready], seconds: float, say: Callable[[str], None] | None = None) -> Ready:
    """What the child says once it has loaded; now and then `say` what it is doing, by its log."""
    said: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def hear(record: Any) -> None:
        if isinstance(record, kind) and not said.done():
            said.set_result(record)

    peer.on_message = hear
    either: set[asyncio.Future[Any]] = {said, peer.died}
    async with telling(say, f"{peer.name} has been starting", peer.last_line):
        done, _ = await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        look_at = f"logs/{peer.name}.log in the run's folder, or raise limits.start_s"
        raise DeadlineExceeded("the controller", f"{peer.name} to start", seconds, look_at)
    if said not in done:
        raise peer.died.result()
    return said.result()
