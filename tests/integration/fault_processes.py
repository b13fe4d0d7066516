"""Processes of the fault trials, forked from one that has imported torch."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any

from headrace.ipc import Peer


class Forked:
    """A process forked from one that has imported torch: it starts in a fraction of a second."""

    def __init__(self, process: Any):
        self._process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()

    async def wait(self, seconds: float) -> int | None:
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while (status := self.poll()) is None and clock() < end:
            await asyncio.sleep(0.005)
        return status


def forking() -> Any:
    """Where processes are forked from. It imports what this process would, with one thread, and whoever asks there
    whether CUDA is available does not begin with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fault_preloaded"])
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


async def fork(
    context: Any, name: str, entry: Any, options: dict[str, Any], channel: dict[str, Any], log: Path
) -> Peer:
    """A process that begins with `entry`, and how to talk to it."""
    ours, theirs = socket.socketpair()
    descriptors = {
        key: value for key, value in channel.items() if key in ("descriptor", "relay") and value is not None
    }
    options = {**options, "channel": {k: v for k, v in channel.items() if k not in descriptors}}
    process = context.Process(
        target=_begin, args=(entry, theirs, _Duplicates(descriptors), options, str(log)), daemon=True
    )
    await asyncio.to_thread(process.start)
    theirs.close()
    ours.setblocking(False)
    peer = Peer(name, Forked(process), log)
    await peer.connect(ours)
    return peer


def _begin(entry: Any, sock: socket.socket, descriptors: Any, options: dict[str, Any], log: str) -> None:
    entry(sock, descriptors, options, log)


class _Duplicates(dict[str, Any]):
    """Descriptors on their way to a child."""

    def __reduce__(self) -> Any:
        return dict, ([(key, reduction.DupFd(value)) for key, value in self.items()],)
