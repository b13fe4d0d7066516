"""Starting child processes on this machine and connecting to them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace import records
from headrace.errors import DeadlineExceeded
from headrace.ipc import Begin, Peer, telling

CHILD = "HEADRACE_CHILD"
"""Set in the environment of every child, to its name."""


class LocalProcess:
    """A child process, waited for without blocking the event loop."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    async def wait(self, seconds: float) -> int | None:
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while (status := self._process.poll()) is None and clock() < end:
            await asyncio.sleep(0.005)
        return status


def compute_threads(*, take_turns: bool = False) -> int:
    """Of the trainer, and of all engines together: half of the cores each, all of them where the two take turns.

    Of eight cores or more at least every eighth is left for all else: messages, environments, publication. A thread
    of theirs on a core that computes keeps the whole team of it waiting.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores -= cores // 8
    return max(1, cores if take_turns else cores // 2)


async def spawn(
    name: str, entry: str, options: dict[str, Any], *, logs: Path, fds: Sequence[int] = (), threads: int = 1
) -> Peer:
    """Start `entry` ("module:function") in a process of its own, with inherited descriptors `fds`.

    What it prints goes to logs/NAME.log. It has a session of its own: Ctrl-C reaches the controller alone.
    """
    ours, theirs = socket.socketpair()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # So that what this process can import, a module beside its script say, the child can.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path and Path(path).is_dir()),
        CHILD: name,
    }
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.orchestration.child", name, entry, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno(), *fds],
            env=environment,
            start_new_session=True,
        )
    theirs.close()
    ours.sendall(records.encode(Begin(options=options)))
    ours.setblocking(False)
    peer = Peer(name, LocalProcess(process), logs / f"{name}.log")
    await peer.connect(ours)
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
