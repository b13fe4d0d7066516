"""A file that grows by whole lines."""

from __future__ import annotations

import os
from pathlib import Path


class LineFile:
    """Appends lines; each is there whole or not at all. Not thread-safe; a failed write raises OSError."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = self._cut_torn_line()

    def append(self, line: bytes) -> None:
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(line)

    def close(self) -> None:
        os.close(self._file)

    def _cut_torn_line(self) -> int:
        """A crash in the middle of a write leaves an unfinished last line: the next one must not join it."""
        size = os.fstat(self._file).st_size
        end, block = size, 1 << 16
        while end > 0:
            start = max(0, end - block)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
        return end
