"""Weights from one process on a GPU to others on the same one: they map the sender's memory and copy from it.

The bytes never leave the device. How many are there is told through a little shared memory (shared_memory.py):
processes cannot see each other's streams. The memory belongs to the sender; a receiver that has mapped it keeps it
readable, also after the sender's death.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, SyncError
from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN
from headrace.sync.transport.shared_memory import Segment
from headrace.sync.transport.watermark import follow

NAME = "cuda_ipc"


def _require_cuda(who: str) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(
            f'sync.transport = "cuda_ipc" needs CUDA at both ends, and {who} finds none',
            f"torch {torch.__version__}, no CUDA device",
            'use sync.transport = "shared_memory"',
        )


class CudaIpcOutlet:
    name = NAME
    align = ALIGN
    keeps = False

    def __init__(self, descriptor: int):
        _require_cuda("the trainer")
        self._told = Segment(descriptor)
        self._generation = 0
        self._memory: Tensor | None = None
        self._nbytes = 0
        self._handle: list[Any] = []

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        nbytes = draft.streams[-1].nbytes
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = None
            # Of changes there is nothing on a device yet; memory for them is the current device's.
            place = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=place)
            self._handle = list(self._memory.untyped_storage()._share_cuda_())
        self._nbytes = nbytes
        self._renew(0)
        return self._memory[:nbytes]

    def location(self) -> dict[str, Any]:
        return {"generation": self._generation, "handle": self._handle}

    def advance(self, filled: int) -> None:
        if filled == self._nbytes:
            torch.cuda.current_stream(self._device).synchronize()
            self._told.tell(self._generation, filled)

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        self._renew(self._nbytes)
        return self.location()

    def retain(self, numbers: Sequence[int]) -> None: ...

    def close(self) -> None:
        self._memory, self._handle = None, []
        self._told.close()

    @property
    def _device(self) -> torch.device:
        assert self._memory is not None
        return self._memory.device

    def _renew(self, filled: int) -> None:
        self._told.bytes(0, grow=True)
        self._generation = max(self._generation, self._told.told()[0]) + 1
        self._told.tell(self._generation, filled)


class CudaIpcInlet:
    def __init__(self, descriptor: int):
        _require_cuda("an engine")
        self._told = Segment(descriptor)
        self._handle: list[Any] = []
        self._mapped: Tensor | None = None

    def chunks(self, stream: Stream, deadline: Deadline, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """All of it at once: a copy on the device has no use for pieces."""
        memory = self._map(stream)
        for first, last in follow(stream, deadline, NAME, self._told.told):
            yield first, memory[first:last]
            torch.cuda.current_stream(memory.device).synchronize()

    def close(self) -> None:
        self._mapped = None
        self._told.close()

    def _map(self, stream: Stream) -> Tensor:
        handle = stream.location["handle"]
        if self._mapped is None or handle != self._handle:
            self._mapped = None
            try:
                storage = torch.UntypedStorage._new_shared_cuda(*handle)
            except RuntimeError as error:
                raise SyncError("transfer", NAME, f"the sender's memory cannot be mapped: {error}") from error
            self._mapped = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._handle = handle
        return self._mapped[: stream.nbytes]
