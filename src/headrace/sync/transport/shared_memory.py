"""Weights through memory that processes of one machine share.

    offset  size  field
    0       8     generation: number of the stream whose bytes follow
    8       8     filled: how many of them are there; receivers follow it
    16      48    zero
    64      …     the stream

The segment is an anonymous file whose descriptor the parent creates and all processes inherit: nothing is left
behind when they end, however they end. Neither end closes the descriptor; it belongs to who created it.

It has no name by which others could open it. Only its inheritors have it, and whoever may trace one of them: such a
process can read their memory as well.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.errors import SyncError
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN
from headrace.sync.transport.watermark import follow

NAME = "shared_memory"
CHUNK_BYTES = 4 << 20
_HEADER_BYTES = 64


def create_segment() -> int:
    """A descriptor of an empty anonymous file, in memory where the system has such files. Processes started with
    it in `pass_fds` inherit it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-weights")
    descriptor, path = tempfile.mkstemp(prefix="headrace-weights-")
    os.unlink(path)
    return descriptor


class Segment:
    """The descriptor's file, mapped as far as was needed so far."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def bytes(self, nbytes: int, *, grow: bool) -> Tensor:
        """The stream's first `nbytes`. The file grows only with `grow`, and never shrinks."""
        mapped = self._mapped(_HEADER_BYTES + nbytes, grow)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=_HEADER_BYTES)

    def tell(self, generation: int, filled: int) -> None:
        words = self._words(True)
        if words[0] != generation:
            # Nobody may take what was filled of the stream before for a part of the new one.
            words[1] = 0
            words[0] = generation
        words[1] = filled

    def told(self) -> tuple[int, int]:
        """(generation, filled)."""
        words = self._words(False)
        generation = words[0]
        return generation, words[1]

    def close(self) -> None:
        # Tensors over it may still be in use: what they do not hold goes.
        self._map = None

    def _words(self, grow: bool) -> memoryview:
        """The header's fields. Each is written and read at once; `struct` would write zeros first, which another
        process can see."""
        return memoryview(self._mapped(_HEADER_BYTES, grow))[:16].cast("Q")

    def _mapped(self, wanted: int, grow: bool) -> mmap.mmap:
        if self._map is None or len(self._map) < wanted:
            size = os.fstat(self._descriptor).st_size
            if size < wanted and grow:
                _reserve(self._descriptor, wanted)
                size = wanted
            if size < wanted:
                raise SyncError("transfer", NAME, f"the segment has {size} bytes of the {wanted} announced")
            self._map = mmap.mmap(self._descriptor, size)
        return self._map


def _reserve(descriptor: int, nbytes: int) -> None:
    """Memory for the file, or an error now rather than a signal when it is written."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
    except OSError as error:
        raise SyncError("announce", NAME, f"no room for {nbytes} bytes of weights: {error}") from error


class SharedMemoryOutlet:
    name = NAME
    align = ALIGN
    keeps = False

    def __init__(self, descriptor: int):
        self._segment = Segment(descriptor)
        self._generation = 0

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        memory = self._segment.bytes(draft.streams[-1].nbytes, grow=True)
        self._nbytes = len(memory)
        self._renew(0)
        return memory

    def location(self) -> dict[str, Any]:
        return {"generation": self._generation}

    def advance(self, filled: int) -> None:
        self._segment.tell(self._generation, filled)

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        self._renew(self._nbytes)
        return self.location()

    def retain(self, numbers: Sequence[int]) -> None: ...

    def close(self) -> None:
        self._segment.close()

    def _renew(self, filled: int) -> None:
        # A sender that took another's place goes on counting where that one stopped.
        self._generation = max(self._generation, self._segment.told()[0]) + 1
        self._segment.tell(self._generation, filled)


class SharedMemoryInlet:
    def __init__(self, descriptor: int):
        self._segment = Segment(descriptor)

    def chunks(self, stream: Stream, deadline: Deadline, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """Views of the segment, as far as it is filled."""
        memory = self._segment.bytes(stream.nbytes, grow=False)
        for first, last in follow(stream, deadline, NAME, self._segment.told):
            for start in range(first, last, CHUNK_BYTES):
                yield start, memory[start : min(start + CHUNK_BYTES, last)]

    def close(self) -> None:
        self._segment.close()
