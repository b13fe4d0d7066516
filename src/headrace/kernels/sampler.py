"""One token for each row of a batch, with its log-prob and support, in buffers that stay where they are.

    logits ─▶ [thresholds] ─▶ block_stats ─▶ pick ─▶ [support_ids]     [kernels.truncation]: if a row may truncate

The reference is `sample` of `engine.native.sampling`. Nothing is read back, so all of it may be captured in a CUDA
graph that replays over the same buffers.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import launch
from headrace.kernels.logits import BLOCK, block_stats, pick
from headrace.kernels.truncation import Supports, support_ids, thresholds


class SamplerInputs(NamedTuple):
    temperature: Tensor
    """float32."""
    top_k: Tensor
    """int32."""
    top_p: Tensor
    """float32."""
    min_p: Tensor
    """float32."""
    uniform: Tensor
    """float64 in [0, 1)."""
    slots: Tensor
    """int32: where in `last_token` a row's token goes; negative for nowhere."""
    last_token: Tensor
    """int32, written in place."""


class SamplerOutputs(NamedTuple):
    tokens: Tensor
    """int32 (B,)."""
    logprobs: Tensor
    """float32 (B,)."""
    supports: Supports | None
    """None if nothing was to be truncated."""


class Sampler:
    """Everything for batches of up to `rows` rows in buffers of its own, which the next call overwrites."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device | str, capacity: int = 1024, block: int = BLOCK
    ) -> None:
        def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        blocks = launch.blocks(vocab, block)
        self._block = block
        self._no_bounds = buffer(torch.float32).fill_(-torch.inf), buffer(torch.int32).fill_(-1)
        self._bounds = buffer(torch.float32), buffer(torch.int32)
        self._stats = buffer(torch.float32, blocks), buffer(torch.float32, blocks)
        self._picked = buffer(torch.int32), buffer(torch.float32)
        self._supports = Supports(
            buffer(torch.int32, capacity), buffer(torch.int32), buffer(torch.int32, launch.blocks(vocab, 32))
        )

    def sample(self, logits_bv: Tensor, inputs: SamplerInputs, truncating: bool) -> SamplerOutputs:
        """One token per row by inverse CDF at its uniform; `truncating` if any row may truncate."""
        rows, block = len(logits_bv), self._block
        heat, *cuts, uniform, slots, last_token = inputs
        bounds = self._no_bounds
        if truncating:
            bounds = thresholds(logits_bv, heat, *cuts, block=block, out=self._bounds)
        known = logits_bv, heat, *bounds
        stats = block_stats(*known, block=block, out=(self._stats[0][:rows], self._stats[1][:rows]))
        picked = self._picked[0][:rows], self._picked[1][:rows]
        pick(*known, *stats, uniform, slots, last_token, block=block, out=picked)
        supports = None
        if truncating:
            out = Supports(*(buffer[:rows] for buffer in self._supports))
            supports = support_ids(*known, out.ids.shape[1], block=block, out=out)
        return SamplerOutputs(*picked, supports)
