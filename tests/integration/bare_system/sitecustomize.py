"""Takes from a process, before it begins, what Linux has and macOS has not: functions, /proc, /dev/shm, prctl.

A folder with this file on PYTHONPATH does it to a Python program and to its children. A keeper runs apart from all
paths (`python -I -S`): `keeper.py` beside this does it to that one, which takes itself for one on a Mac.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

LOG = "PYTHON_BARE_SYSTEM_LOG"
HERE = os.path.dirname(os.path.abspath(__file__))
ABSENT = {
    os: (
        *("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "eventfd"),
        *("pidfd_open", "splice", "copy_file_range", "setresuid", "getrandom", "pipe2", "unshare", "setns"),
        *("O_PATH", "O_TMPFILE", "O_DIRECT", "O_NOATIME", "SCHED_BATCH", "waitid"),
    ),
    fcntl: ("F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_OFD_SETLK", "F_ADD_SEALS"),
    mmap: ("MAP_POPULATE", "MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_REMOVE"),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "SIGSTKFLT", "SIGPWR", "SIGRTMIN"),
    socket: ("SO_PEERCRED", "SO_DOMAIN", "SO_PROTOCOL", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK"),
}


def take_away() -> None:
    for module, names in ABSENT.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for owner, names in ((os, ("open", "listdir", "stat", "lstat", "scandir", "readlink")), (io, ("open",))):
        for name in names:
            setattr(owner, name, _without_linux_files(getattr(owner, name)))
    builtins.open = io.open
    find = ctypes.CDLL.__getattr__

    def found(library: ctypes.CDLL, name: str) -> Any:
        if name in ("prctl", "mallopt", "malloc_trim"):
            raise AttributeError(name)
        return find(library, name)

    ctypes.CDLL.__getattr__ = found  # type: ignore[method-assign]
    sys.modules["triton"] = None  # type: ignore[assignment]


def _without_linux_files(function: Any) -> Any:
    def call(path: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(path, str | bytes | os.PathLike) and _is_linux_only(os.fsdecode(path)):
            asked_by = sys._getframe(1).f_globals.get("__name__", "")
            # On a Mac these are told in another way.
            if not asked_by.startswith(("psutil", "platform")):
                raise FileNotFoundError(2, "a Mac has no such file", os.fsdecode(path))
        return function(path, *rest, **options)

    return call


def _is_linux_only(path: str) -> bool:
    return path.startswith(("/proc", "/dev/shm", "/sys/"))


class _Popen(subprocess.Popen):
    """Starts keepers as `keeper.py` beside this."""

    def __init__(self, command: Any, *rest: Any, **options: Any):
        if isinstance(command, list) and command[1:3] == ["-I", "-S"]:
            command = [*command[:3], os.path.join(HERE, "keeper.py"), *command[3:]]
        super().__init__(command, *rest, **options)


def note(who: str) -> None:
    """So that a test knows it was here."""
    with open(os.environ[LOG], "a") as log:
        log.write(f"{who}\n")


if LOG in os.environ:
    take_away()
    subprocess.Popen = _Popen  # type: ignore[misc]
    note(" ".join(sys.orig_argv[1:]))
