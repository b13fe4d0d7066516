"""Attention over a paged cache by the Triton kernels: single tokens of some sequences, chunks of others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.kernels import attention as kernels
from headrace.kernels import decode, hopper_decode
from headrace.models.ops import Rotation
from headrace.models.quantized import FLOAT8, to_float8


class PagedContext:
    """A `CacheContext`. The pass's first tokens are single queries, the others chunks; both as lists of items.

    `layer` gives a layer's (keys, values), (G, N, S, D) each. With `invariant` the result of a token does not
    depend on what else is in the pass, bit for bit; then no sequence may be split over items. `counters` are
    those of `hopper_decode.attend_single`.
    """

    def __init__(
        self,
        layer: Callable[[int], tuple[Tensor, Tensor]],
        table: Tensor,
        rows: Tensor,
        single: Tensor,
        merges: Tensor,
        chunks: Tensor,
        counters: Tensor,
        *,
        invariant: bool = False,
    ):
        self._layer, self._table, self.rows = layer, table, rows
        self._single, self._merges, self._chunks = single, merges, chunks
        self._counters, self._invariant = counters, invariant
        self._partial: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)

    def keys(self, layer: int) -> Tensor:
        return self._layer(layer)[0]

    def values(self, layer: int) -> Tensor:
        return self._layer(layer)[1]

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        keep = self.rows >= 0
        rows = self.rows[keep].long()
        for cache, new_tgd in zip(self._layer(layer), (k_tgd, v_tgd), strict=True):
            new_gtd = new_tgd[keep].transpose(0, 1)
            if cache.dtype == FLOAT8:
                # Indexed writes are not implemented for float8: they move bytes.
                cache.flatten(1, 2).view(torch.uint8)[:, rows] = to_float8(new_gtd).view(torch.uint8)
            else:
                cache.flatten(1, 2)[:, rows] = new_gtd.to(cache.dtype)
        return self.attend_cached(layer, q_thd)

    def attend_cached(self, layer: int, q_thd: Tensor) -> Tensor:
        out_thd = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
        cache = kernels.Cache.paged(*self._layer(layer))
        self._attend_single(q_thd, cache, out_thd)
        chunk = kernels.INVARIANT if self._invariant else kernels.CHUNK
        kernels.attend(q_thd, cache, self._table, self._chunks, out_thd, chunk)
        return out_thd

    def attend_projected(
        self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, rotation: Rotation
    ) -> Tensor | None:
        """Where all tokens are single queries of the kernel for Hopper."""
        cache = kernels.Cache.paged(*self._layer(layer))
        projected = hopper_decode.Projected(k_tgd, v_tgd, rotation, self.rows)
        if self._invariant or len(self._chunks) or not hopper_decode.serves(q_thd, cache, projected):
            return None
        out_thd = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
        self._attend_on_hopper(q_thd, cache, out_thd, projected)
        return out_thd

    def _attend_single(self, q_thd: Tensor, cache: kernels.Cache, out_thd: Tensor) -> None:
        if not self._invariant and hopper_decode.serves(q_thd, cache):
            self._attend_on_hopper(q_thd, cache, out_thd)
            return
        scratch = self._scratch(q_thd)
        if not self._invariant and cache.keys.dtype == FLOAT8 and decode.serves(q_thd, cache):
            decode.attend_single(q_thd, cache, self._table, self._single, out_thd, *scratch)
        else:
            tile = self._single_tile(q_thd.shape[1], cache.keys.shape[0])
            kernels.attend(q_thd, cache, self._table, self._single, out_thd, tile, *scratch)
        self._merge(out_thd)

    def _attend_on_hopper(
        self,
        q_thd: Tensor,
        cache: kernels.Cache,
        out_thd: Tensor,
        projected: hopper_decode.Projected | None = None,
    ) -> None:
        work, (partial, statistics) = (self._single, self._merges), self._scratch(q_thd)
        hopper_decode.attend_single(
            q_thd, cache, self._table, *work, out_thd, self._counters, partial, statistics, projected
        )

    def _single_tile(self, heads: int, groups: int) -> kernels.Tile:
        if self._invariant:
            return kernels.INVARIANT
        # Those that sequences may be split into beyond one each are mostly empty.
        if (len(self._single) - len(self._merges)) * groups < kernels.MANY:
            return kernels.DECODE
        return kernels.DECODE_MANY_WIDE if heads // groups >= kernels.WIDE else kernels.DECODE_MANY

    def _merge(self, out_thd: Tensor) -> None:
        partial, statistics = self._partial
        if partial is not None and statistics is not None:
            kernels.merge(self._merges, partial, statistics, out_thd)

    def _scratch(self, q_thd: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Room for partial results, the same for all layers."""
        if len(self._merges) and self._partial[0] is None:
            shape = (len(self._single), q_thd.shape[1])
            self._partial = (
                torch.empty(*shape, q_thd.shape[2], dtype=torch.float32, device=q_thd.device),
                torch.empty(*shape, 2, dtype=torch.float32, device=q_thd.device),
            )
        return self._partial
