"""Weights through a folder that the processes share, on one machine or on a network.

Each version is a directory that describes itself: version_format.py says what is in it, version_folder.py how it
comes and goes. It appears, by a rename, once all of it is on the disk. The sender does not wait for that: it fills
memory that is the file's, and another thread brings it to the disk.

Receivers read, they do not map: a file that another machine removes or cuts is an error then, not a signal.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import SyncError
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.transport.version_folder import VersionFolder, synchronise
from headrace.sync.transport.version_format import Contents, contents_of

NAME = "files"
CHUNK_BYTES = 4 << 20
LOOK_S = 0.25
"""So often a receiver that waits lists the folder, which also makes a network file system ask its server."""

_log = logging.getLogger(__name__)


class _Draft:
    """A version that is being written."""

    def __init__(self, folder: VersionFolder, manifest: Manifest):
        self.number, self.nbytes = manifest.version.number, manifest.streams[-1].nbytes
        self._folder = folder
        contents = contents_of(manifest, NAME)
        self._start = len(contents.head)
        self.path, self.hidden = folder.begin(self.number)
        try:
            self._write(contents)
        except BaseException:
            self.drop()
            raise

    @property
    def location(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "writing": str(self.hidden),
            "file": self._file.name,
            "start": self._start,
        }

    def memory(self) -> Tensor:
        """The stream's bytes in the file."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._file.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), self._start + self.nbytes)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=self.nbytes, offset=self._start)

    def finish(self) -> None:
        """Bring everything to the disk, then show it."""
        try:
            for file in self.hidden.iterdir():
                synchronise(file)
            self._folder.show(self.hidden, self.path)
        except OSError as error:
            self.drop()
            why = f"version {self.number} could not be brought to the disk at {self.path}: {error}"
            raise SyncError("transfer", NAME, why) from error

    def check(self) -> None:
        """Raise SyncError unless the version is there, as long as it was: reading what is mapped of a file that was
        cut would end the process."""
        if not self.path.is_dir():
            raise SyncError("announce", NAME, f"{self.path} is gone; somebody removed it")
        file, nbytes = self.path / self._file.name, self._start + self.nbytes
        size = file.stat().st_size if file.exists() else 0
        if size != nbytes:
            raise SyncError("announce", NAME, f"{file} has {size} bytes of {nbytes}; somebody cut it")

    def drop(self) -> None:
        shutil.rmtree(self.hidden, ignore_errors=True)

    def _write(self, contents: Contents) -> None:
        for name, content in contents.others.items():
            (self.hidden / name).write_bytes(content)
        self._file = self.hidden / contents.file
        with self._file.open("wb") as file:
            _reserve(file.fileno(), self._start + self.nbytes)
            file.write(contents.head)


def _reserve(descriptor: int, nbytes: int) -> None:
    """Room on the disk, or an error now rather than a signal when the mapped file is written."""
    if nbytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


class FilesOutlet:
    name = NAME
    align = 1
    keeps = True

    def __init__(self, folder: str, run: str):
        """Versions of other runs in the folder stay as they are."""
        self._where = folder
        self._folder = VersionFolder(folder, run)
        try:
            self._folder.open()
        except OSError as error:
            raise SyncError("announce", NAME, f"versions cannot be kept in {folder}: {error}") from error
        self._draft: _Draft | None = None
        self._finishing: Future[None] | None = None
        self._disk = ThreadPoolExecutor(1, "headrace-files")

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        """Waits for the version before to be on the disk. Where that failed, raises its SyncError."""
        self._leave()
        stream = draft.streams[-1]
        try:
            self._draft = _Draft(self._folder, draft)
            memory = self._draft.memory()
        except OSError as error:
            self._leave()
            why = f"{self._where} takes no version {stream.number} of {stream.nbytes} bytes: {error}"
            raise SyncError("announce", NAME, why) from error
        if stream.nbytes == 0:
            self.advance(0)
        return memory

    def location(self) -> dict[str, Any]:
        assert self._draft is not None
        return self._draft.location

    def advance(self, filled: int) -> None:
        """Once all bytes are there the version appears as soon as the disk has it."""
        assert self._draft is not None
        if filled == self._draft.nbytes and self._finishing is None:
            self._finishing = self._disk.submit(self._draft.finish)

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        if self._draft is None or self._finishing is None:
            raise SyncError("announce", NAME, "no version is complete")
        # Also where the disk is still busy with it: only then is it known whether its bytes can be read.
        self._finishing.result()
        self._draft.check()
        return self.location()

    def retain(self, numbers: Sequence[int]) -> None:
        self._disk.submit(self._keep, tuple(numbers))

    def close(self) -> None:
        """Versions stay. Raises the SyncError of one that could not be brought to the disk."""
        try:
            self._leave()
        finally:
            self._disk.shutdown()

    def _keep(self, numbers: Sequence[int]) -> None:
        try:
            self._folder.keep(numbers)
        except OSError as error:  # what stays costs room alone, and a full disk is an error of its own
            _log.warning("old versions stay in %s: %s", self._where, error)

    def _leave(self) -> None:
        """Complete the draft in hand, or drop it where not all of its bytes came."""
        draft, finishing = self._draft, self._finishing
        self._draft = self._finishing = None
        if finishing is not None:
            finishing.result()
        elif draft is not None:
            draft.drop()


class FilesInlet:
    def chunks(self, stream: Stream, deadline: Deadline, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Waits until the version appears."""
        path, start = Path(stream.location["path"]), stream.location["start"]
        _await(stream, path, Path(stream.location["writing"]), deadline)
        direct = into is not None and into.device.type == "cpu"
        target = into if direct else torch.empty(min(CHUNK_BYTES, stream.nbytes), dtype=torch.uint8)
        assert target is not None
        try:
            with open(path / stream.location["file"], "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != start + stream.nbytes:
                    why = f"{file.name} has {size} bytes of the {start + stream.nbytes} announced"
                    raise SyncError("transfer", NAME, why)
                for first in range(0, stream.nbytes, CHUNK_BYTES):
                    count = min(CHUNK_BYTES, stream.nbytes - first)
                    chunk = target[first : first + count] if direct else target[:count]
                    _read(file.fileno(), chunk, start + first, stream, deadline)
                    yield first, chunk
        except OSError as error:
            raise SyncError("transfer", NAME, f"version {stream.number} cannot be read: {error}") from error

    def close(self) -> None: ...


def _await(stream: Stream, path: Path, writing: Path, deadline: Deadline) -> None:
    missed, look = 0, time.monotonic() + LOOK_S
    while not path.is_dir():
        if time.monotonic() >= look:
            missed = 0 if _listed(path, writing) else missed + 1
            if missed == 2:  # it may be renamed just while the folder is listed
                why = f"version {stream.number} is not in {path.parent}: replaced by a later one, or given up"
                raise SyncError("transfer", NAME, why)
            look = time.monotonic() + LOOK_S
        deadline.pause()
    deadline.progress()


def _listed(*paths: Path) -> bool:
    try:
        names = os.listdir(paths[0].parent)
    except OSError as error:
        why = f"the folder of versions cannot be read, is it the same on this machine? {error}"
        raise SyncError("transfer", NAME, why) from error
    return any(path.name in names for path in paths)


def _read(descriptor: int, chunk: Tensor, at: int, stream: Stream, deadline: Deadline) -> None:
    view, done = chunk.numpy().data, 0
    while done < len(view) and deadline.left > 0:
        count = os.preadv(descriptor, [view[done:]], at + done)
        if count == 0:
            raise SyncError("transfer", NAME, f"version {stream.number} ends at byte {at + done} of its file")
        done += count
