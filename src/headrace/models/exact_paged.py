"""Attention over a paged cache in plain PyTorch that does not depend on what else is in the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.models import exact_plain
from headrace.models.attention import Spans


class InvariantContext:
    """Consecutive tokens of some sequences, packed; each sees all of its sequence up to itself.

    `layer` gives a layer's (keys, values), (G, N, S, D) each and contiguous; `tables` a sequence's pages. Sequence
    i has `counts[i]` tokens in the pass, the first at `positions[i]`. Where `writes` is false a sequence's keys and
    values are in the cache already. On the CPU results are those of `ExactOps` over a `PackedContext`, bit for bit.
    """

    def __init__(
        self,
        layer: Callable[[int], tuple[Tensor, Tensor]],
        tables: Sequence[np.ndarray] | np.ndarray,
        positions: np.ndarray,
        counts: np.ndarray,
        writes: np.ndarray | None = None,
    ):
        self._layer = layer
        keys = layer(0)[0]
        self._device, (_, pages, size, _) = keys.device, keys.shape
        self._head_step = pages * size
        starts = np.cumsum(counts) - counts
        self._spans = Spans(starts, counts, positions, np.zeros_like(starts))
        longest = -(-int((positions + counts).max()) // exact_plain.KEYS) * exact_plain.KEYS
        at = np.minimum(np.arange(longest), (positions + counts - 1)[:, None])
        self._key_rows = np.stack([t[own // size] * size + own % size for t, own in zip(tables, at, strict=True)])
        sequence = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(sequence)) - starts[sequence] + positions[sequence]
        written = np.arange(len(sequence)) if writes is None else np.flatnonzero(writes[sequence])
        self.positions = self._there(position)
        self._written = self._there(written)
        self._rows = self._there(self._key_rows[sequence[written], position[written]])
        self._work: exact_plain.Blocks | None = None

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        keys, values = self._layer(layer)
        for cache, new_tgd in ((keys, k_tgd), (values, v_tgd)):
            cache.flatten(1, 2)[:, self._rows] = new_tgd[self._written].transpose(0, 1)
        if self._work is None:
            per_group = q_thd.shape[1] // k_tgd.shape[1]
            self._work = exact_plain.blocks(self._spans, self._key_rows, self._head_step, per_group, self._device)
        return exact_plain.attend(q_thd, keys, values, self._work)

    def _there(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
