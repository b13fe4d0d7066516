"""A folder that versions appear in, whole or not at all, and leave again.

    version-00000012-<run><random>                        a version that is there
    .version-00000012-<run><random>.<machine>.<process>   one that comes or goes, in the hands of that process

A version comes and goes by a rename. What a process left that died in between is swept away by the next sender.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

_VISIBLE = re.compile(r"version-(?P<number>\d{8,})-(?P<run>[0-9a-f]{8})[0-9a-f]{8}")
_HIDDEN = re.compile(rf"\.{_VISIBLE.pattern}\.(?P<machine>[0-9a-f]{{8}})\.(?P<process>\d+)")
ABANDONED_S = 24 * 3600.0
"""What comes or goes for so long has nobody any more, on whatever machine its process was."""


class VersionFolder:
    """As one sender sees it. Versions of other runs are none of its business."""

    def __init__(self, folder: str, run: str):
        """`run`: eight hexadecimal digits."""
        self._folder = Path(folder).absolute()
        self._run = run
        self._kept: frozenset[int] = frozenset()
        self._kept_before: frozenset[int] = frozenset()

    def open(self) -> None:
        """Make the folder if need be, for this user alone, and sweep away what dead senders left. Who may read or
        change a folder that is there is for whoever made it to say."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in self._folder.iterdir():
            found = _HIDDEN.fullmatch(entry.name)
            if found and (found["run"] == self._run or _abandoned(entry, found)):
                shutil.rmtree(entry, ignore_errors=True)
        self._kept = frozenset(self._visible().values())  # of the sender whose place this one takes

    def begin(self, number: int) -> tuple[Path, Path]:
        """(where a version of this number will be, the directory to write it in, which is made)."""
        path = self._folder / f"version-{number:08d}-{self._run}{secrets.token_hex(4)}"
        hidden = self._hidden(path)
        hidden.mkdir()
        return path, hidden

    def show(self, hidden: Path, path: Path) -> None:
        """The rename. It outlasts a crash of the machine if everything in `hidden` was synchronised before."""
        synchronise(hidden)
        hidden.rename(path)
        synchronise(self._folder)

    def keep(self, numbers: Sequence[int]) -> None:
        """Remove this run's other versions, except those that were kept before: a slow reader may be about to
        open them. One that has a file open can read on."""
        if self._kept != (kept := frozenset(numbers)):
            self._kept, self._kept_before = kept, self._kept
        for entry, number in self._visible().items():
            if number not in kept | self._kept_before:
                shutil.rmtree(entry.rename(self._hidden(entry)), ignore_errors=True)

    def _visible(self) -> dict[Path, int]:
        """This run's versions and their numbers."""
        found = {entry: _VISIBLE.fullmatch(entry.name) for entry in self._folder.iterdir()}
        return {entry: int(name["number"]) for entry, name in found.items() if name and name["run"] == self._run}

    def _hidden(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{_machine()}.{os.getpid()}")


def synchronise(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot do it for directories, whose changes they write at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _abandoned(entry: Path, found: re.Match[str]) -> bool:
    if found["machine"] == _machine() and not _alive(int(found["process"])):
        return True
    try:
        return time.time() - entry.stat().st_mtime > ABANDONED_S
    except FileNotFoundError:  # its process was faster
        return False


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _machine() -> str:
    """Equal in processes that know each other by their numbers: not so in two containers of one machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        identity = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        identity = socket.gethostname()
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
