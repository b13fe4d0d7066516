"""Numbers on their way to the device and back: pinned blocks in turn, so that no step waits for another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.sampler import SamplerOutputs

ALIGN = 16
_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


class Layout:
    """Named arrays one behind the other in a block of bytes."""

    def __init__(self, fields: Mapping[str, tuple[Any, tuple[int, ...]]]):
        self._places: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        self.size = 0
        for name, (kind, shape) in fields.items():
            dtype = np.dtype(kind)
            self._places[name] = (self.size, dtype, shape)
            self.size += -(-int(np.prod(shape)) * dtype.itemsize // ALIGN) * ALIGN

    def on_host(self, block: np.ndarray) -> dict[str, np.ndarray]:
        return {
            name: np.ndarray(shape, dtype, block.data, offset)
            for name, (offset, dtype, shape) in self._places.items()
        }

    def on_device(self, block: Tensor) -> dict[str, Tensor]:
        return {
            name: block[offset : offset + int(np.prod(shape)) * dtype.itemsize].view(_TORCH[dtype]).view(shape)
            for name, (offset, dtype, shape) in self._places.items()
        }


class Copied(NamedTuple):
    """A step's results on their way back."""

    done: torch.cuda.Event | None
    rows: int
    tokens: Tensor
    logprobs: Tensor
    counts: Tensor | None
    ids: Tensor | None
    mask: Tensor | None
    """Stays on the device: it is needed only where a support is larger than its list of ids."""


class Staging:
    """`depth` blocks each way; a block is used again when the step that used it is done."""

    def __init__(self, size: int, rows: int, device: torch.device, depth: int):
        self._cuda = device.type == "cuda"
        self._hosts = [self._pinned(size, torch.uint8) for _ in range(depth)]
        self._sent: list[torch.cuda.Event | None] = [None] * depth
        self._turn = 0
        self.device_block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._tokens = [self._pinned(rows, torch.int32) for _ in range(depth)]
        self._logprobs = [self._pinned(rows, torch.float32) for _ in range(depth)]
        self._supports: list[tuple[Tensor, Tensor, Tensor]] = []
        self._depth, self._rows, self._device = depth, rows, device

    def host_block(self) -> np.ndarray:
        """The block to fill for the next step."""
        self._turn = (self._turn + 1) % self._depth
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        return self._hosts[self._turn].numpy()

    def send(self, size: int) -> None:
        """Copy what was filled to the device."""
        self.device_block[:size].copy_(self._hosts[self._turn][:size], non_blocking=True)
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._sent[self._turn] = event

    def receive(self, outputs: SamplerOutputs, rows: int) -> Copied:
        """Copy results back, as soon as they are there."""
        tokens, logprobs = self._tokens[self._turn][:rows], self._logprobs[self._turn][:rows]
        tokens.copy_(outputs.tokens[:rows], non_blocking=True)
        logprobs.copy_(outputs.logprobs[:rows], non_blocking=True)
        counts = ids = mask = None
        if outputs.supports is not None:
            kept_counts, kept_ids, kept_mask = self._support_blocks(outputs)
            counts, ids, mask = kept_counts[:rows], kept_ids[:rows], kept_mask[:rows]
            counts.copy_(outputs.supports.counts[:rows], non_blocking=True)
            ids.copy_(outputs.supports.ids[:rows], non_blocking=True)
            mask.copy_(outputs.supports.mask[:rows], non_blocking=True)
        done = None
        if self._cuda:
            done = torch.cuda.Event()
            done.record()
        return Copied(done, rows, tokens, logprobs, counts, ids, mask)

    def _support_blocks(self, outputs: SamplerOutputs) -> tuple[Tensor, Tensor, Tensor]:
        assert outputs.supports is not None
        if not self._supports:
            capacity, words = outputs.supports.ids.shape[1], outputs.supports.mask.shape[1]
            for _ in range(self._depth):
                counts = self._pinned(self._rows, torch.int32)
                ids = self._pinned(self._rows * capacity, torch.int32).view(-1, capacity)
                mask = torch.empty(self._rows, words, dtype=torch.int32, device=self._device)
                self._supports.append((counts, ids, mask))
        return self._supports[self._turn]

    def _pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=self._cuda)
