"""Attention over pages: one context per forward pass, for each of the three kinds of pass.

Shape letters: T tokens of the pass, H query heads, G key/value heads, Q query heads per key/value head,
D head size, B sequences of a group, L tokens of a group's gathered pages.

Beyond a sequence's end its pages hold what others left there, and that may be no number: it must not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.engine.native.kv import KvCache
from headrace.models import PackedContext

# Padding that is cheaper than one more group of kernel calls per layer, and the most gathered at once.
WORTH_A_GROUP_BYTES = {"cpu": 2**18, "cuda": 2**25}
MOST_GATHERED_BYTES = {"cpu": 2**26, "cuda": 2**30}


class PromptContext:
    """Whole prompts, packed; nothing of them is cached yet. Writes their pages."""

    def __init__(self, kv: KvCache, lengths: list[int], pages: list[np.ndarray]):
        self._kv = kv
        self._packed = PackedContext(lengths, kv.device)
        positions = np.concatenate([np.arange(length) for length in lengths])
        page_of_token = np.concatenate(
            [own.repeat(kv.page_size)[:length] for own, length in zip(pages, lengths, strict=True)]
        )
        self._rows = kv.row_index(page_of_token, positions)
        self.positions = self._packed.positions

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        self._kv.write(layer, self._rows, k_tgd, v_tgd)
        return self._packed.attend(layer, q_thd, k_tgd, v_tgd)


@dataclass(slots=True)
class _Suffixes:
    pages: Tensor
    """For `KvCache.gather_keys`."""
    sequences: int
    queries: Tensor
    """(B, new tokens) place of each query in the pass; padding repeats a sequence's last."""
    real: Tensor
    """(B, new tokens) false at padding."""
    sees: Tensor
    """(B, 1, new tokens, L)."""
    beyond: Tensor
    """For `KvCache.gather_keys`."""


class SuffixContext:
    """The tokens after each sequence's cached ones, packed. They see those and, causally, themselves."""

    def __init__(self, kv: KvCache, tables: list[np.ndarray], cached: list[int], new: list[int]):
        self._kv = kv
        positions = [np.arange(c, c + n) for c, n in zip(cached, new, strict=True)]
        page_of_token = [table[where // kv.page_size] for table, where in zip(tables, positions, strict=True)]
        flat_positions = np.concatenate(positions)
        self._rows = kv.row_index(np.concatenate(page_of_token), flat_positions)
        self.positions = torch.from_numpy(flat_positions).to(kv.device)
        self.lasts = np.cumsum(new) - 1
        """Each sequence's last token in the pass."""
        starts = self.lasts + 1 - np.array(new)
        self._groups = []
        by_size: dict[int, list[int]] = {}
        for i, n in enumerate(new):
            by_size.setdefault(n.bit_length(), []).append(i)
        for members in by_size.values():
            longest = max(new[i] for i in members)
            pages = max(len(tables[i]) for i in members)
            padded = np.stack([np.pad(tables[i], (0, pages - len(tables[i]))) for i in members])
            offsets = np.arange(longest)
            sizes = np.array([new[i] for i in members])[:, None]
            queries = starts[members][:, None] + np.minimum(offsets, sizes - 1)
            query_positions = np.array([cached[i] for i in members])[:, None] + np.minimum(offsets, sizes - 1)
            places = np.arange(pages * kv.page_size)
            sees = places <= query_positions[:, :, None]
            self._groups.append(
                _Suffixes(
                    pages=kv.page_index(padded),
                    sequences=len(members),
                    queries=torch.from_numpy(queries).to(kv.device),
                    real=torch.from_numpy(offsets < sizes).to(kv.device),
                    sees=torch.from_numpy(sees).to(kv.device)[:, None],
                    beyond=_beyond(places > query_positions[:, -1:], kv),
                )
            )

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        self._kv.write(layer, self._rows, k_tgd, v_tgd)
        out_thd = torch.empty_like(q_thd)
        for group in self._groups:
            pages = (group.pages, group.sequences, group.beyond)
            keys = self._kv.gather_keys(layer, *pages).transpose(0, 1)
            values = self._kv.gather_values(layer, *pages).transpose(0, 1)
            queries = q_thd[group.queries].transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=group.sees, enable_gqa=queries.shape[1] != keys.shape[1]
            )
            out_thd[group.queries[group.real]] = attended.transpose(1, 2)[group.real]
        return out_thd


@dataclass(slots=True)
class _Rows:
    first: int
    last: int
    pages: Tensor
    """For `KvCache.gather_keys`."""
    bias: Tensor
    """(G·B, 1, L): 0 where a row sees a key, -inf elsewhere."""
    beyond: Tensor | None
    """For `KvCache.gather_keys`. None: see whether it matters first."""


class DecodeContext:
    """One token per sequence. Rows are given by rising position, so that those of like length are gathered
    together and little padding is read. Where `writes` is false a token's keys and values are there already."""

    def __init__(self, kv: KvCache, tables: np.ndarray, positions: np.ndarray, writes: np.ndarray):
        self._kv = kv
        # A third faster than scaled_dot_product_attention for small float32 rows on a CPU.
        self._by_products = kv.device.type == "cpu" and kv.dtype == torch.float32
        count = len(positions)
        size = kv.page_size
        self._rows = kv.row_index(tables[np.arange(count), positions // size], positions, writes)
        self._groups = []
        for first, last, pages in group_rows(positions // size + 1, kv.page_bytes, kv.device.type):
            seen = np.arange(pages * size) <= positions[first:last, None]
            bias = np.where(seen, np.float32(0), np.float32(-math.inf))[:, None]
            repeated = torch.from_numpy(bias).to(kv.device, kv.dtype).repeat(kv.heads, 1, 1)
            beyond = None if self._by_products else _beyond(~seen, kv)
            self._groups.append(_Rows(first, last, kv.page_index(tables[first:last, :pages]), repeated, beyond))

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        self._kv.write(layer, self._rows, k_tgd, v_tgd)
        tokens, heads, dim = q_thd.shape
        # (G, B, Q, D): every query head beside the keys it shares
        q_gbqd = q_thd.view(tokens, self._kv.heads, -1, dim).transpose(0, 1)
        outputs = [self._group(layer, group, q_gbqd[:, group.first : group.last]) for group in self._groups]
        out_gbqd = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return out_gbqd.transpose(0, 1).reshape(tokens, heads, dim)

    def _group(self, layer: int, group: _Rows, q_gbqd: Tensor) -> Tensor:
        if self._by_products:
            return self._products(layer, group, q_gbqd)
        pages = (group.pages, group.last - group.first, group.beyond)
        keys, values = self._kv.gather_keys(layer, *pages), self._kv.gather_values(layer, *pages)
        bias = group.bias.view(*keys.shape[:2], 1, -1).expand(-1, -1, q_gbqd.shape[2], -1)
        return F.scaled_dot_product_attention(q_gbqd, keys, values, attn_mask=bias)

    def _products(self, layer: int, group: _Rows, q_gbqd: Tensor) -> Tensor:
        pages = (group.pages, group.last - group.first, group.beyond)
        queries = q_gbqd.reshape(-1, *q_gbqd.shape[2:])
        scale = 1 / math.sqrt(queries.shape[-1])
        keys = self._kv.gather_keys(layer, *pages).flatten(0, 1)
        scores = torch.baddbmm(group.bias, queries, keys.transpose(1, 2), alpha=scale)
        values = self._kv.gather_values(layer, *pages).flatten(0, 1)
        out = torch.bmm(torch.softmax(scores, -1), values).view(q_gbqd.shape)
        if group.beyond is None and math.isnan(out.sum()):
            # What is no number stays none when -inf is added to it, and when it is multiplied by zero. It is rare,
            # and to look for it costs a tenth of writing zeros each time.
            group.beyond = torch.isinf(group.bias).flatten().nonzero().flatten()
            return self._products(layer, group, q_gbqd)
        return out


def _beyond(beyond_bl: np.ndarray, kv: KvCache) -> Tensor:
    """The rows of a gathering, all heads, that are marked for its sequences."""
    return torch.from_numpy(np.flatnonzero(np.tile(beyond_bl, (kv.heads, 1)))).to(kv.device)


def group_rows(pages: np.ndarray, page_bytes: int, device: str) -> list[tuple[int, int, int]]:
    """(first, last, pages) of runs of rows, in the rows' order, given each row's number of pages, rising.

    A new run begins where padding the shorter rows would cost more than a run of their own.
    """
    worth, most = WORTH_A_GROUP_BYTES[device] // page_bytes, MOST_GATHERED_BYTES[device] // page_bytes
    counts, firsts = np.unique(pages, return_index=True)
    runs: list[tuple[int, int, int]] = []
    last, widest, padding = len(pages), int(pages[-1]), 0
    upper = last
    for count, first in zip(counts[::-1].tolist(), firsts[::-1].tolist(), strict=True):
        padding += (upper - first) * (widest - count)
        if padding > worth:
            runs += _pieces(upper, last, widest, most)
            last, widest, padding = upper, count, 0
        upper = first
    return sorted(runs + _pieces(0, last, widest, most))


def _pieces(first: int, last: int, pages: int, most_pages: int) -> list[tuple[int, int, int]]:
    step = max(1, most_pages // pages)
    return [(start, min(start + step, last), pages) for start in range(first, last, step)]
