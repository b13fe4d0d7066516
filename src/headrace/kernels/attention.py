"""Attention of queries over keys that lie in pages or packed rows, for decoding and for prompts alike.

The work is a list of items, one row of int32 each, made by `decode_items` and `chunk_items` on the host:

    token  count  position  first  last  place  part  merge
      │      │       │        └──────┴── keys [first, last) of the sequence are read
      │      │       └─ position of the first query; query i sees keys up to position + i
      │      └─ consecutive queries of one sequence; 0: nothing to do
      └─ row of the first query                 place: row of the page table, or first row of packed keys
                                                part: -1, or where the partial result goes until the parts
                                                are joined; merge: the row of the merges that says which

A long sequence's keys are split over several items (split-K), whose partial results `merge` joins in order.
With one item per query block and a fixed tile the result of a query depends on its own keys alone, bit for bit,
whatever else is in the batch. Shape letters: T tokens, H query heads, G key/value heads, Q = H / G, D head size,
N pages, S tokens of a page, W items.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

ITEM = 8
"""int32 numbers of an item."""
MERGE = 4
"""int32 numbers of a merge: token, first part, parts, unused. No parts: nothing to do."""
LONG = 1.5
"""Times the mean: sequences that are begun before the others."""
LEAST_SPLIT = 256
"""Keys below which splitting a sequence gains nothing."""


class Tile(NamedTuple):
    rows: int
    """Query rows of a program: `rows // Q` queries of all heads that share a key head."""
    keys: int
    warps: int
    stages: int


DECODE = Tile(rows=16, keys=64, warps=4, stages=2)
DECODE_MANY = Tile(rows=16, keys=32, warps=1, stages=2)
DECODE_MANY_WIDE = Tile(rows=16, keys=16, warps=1, stages=6)
"""For `WIDE` or more query heads of each key head."""
WIDE = 4
MANY = 1024
"""Programs from which small ones are faster: there are enough to fill the device with single warps."""
CHUNK = Tile(rows=128, keys=64, warps=8, stages=2)
INVARIANT = Tile(rows=16, keys=64, warps=4, stages=3)
"""Used for prompts and for decoding alike where results must not depend on the batch."""


class Cache(NamedTuple):
    """Where keys and values lie: rows of one head are `row` elements apart, heads `head` elements."""

    keys: Tensor
    values: Tensor
    row: int
    head: int
    page: int
    """Tokens of a page; 0: packed, no pages."""

    @staticmethod
    def paged(keys_gnsd: Tensor, values_gnsd: Tensor) -> Cache:
        size, dim = keys_gnsd.shape[2:]
        return Cache(keys_gnsd, values_gnsd, dim, keys_gnsd.stride(0), size)

    @staticmethod
    def packed(keys_tgd: Tensor, values_tgd: Tensor) -> Cache:
        assert keys_tgd.stride() == values_tgd.stride()
        return Cache(keys_tgd, values_tgd, keys_tgd.stride(0), keys_tgd.stride(1), 0)


@triton.jit
def _attend(
    q, keys, values, table, items, out, partial, statistics,
    q_stride, out_stride, row_stride, head_stride, table_stride, scale,
    GROUPS: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ITEM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # One axis: the others take no more than 65,535 programs.
    group, item = tl.program_id(0) % GROUPS, items + tl.program_id(0) // GROUPS * ITEM
    # Neither items nor table are written by the launch before this one, so they need not wait for it.
    count = tl.load(item + 1)
    token, position = tl.load(item), tl.load(item + 2)
    first, last, place, part = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    launch.wait(EARLY)
    if count == 0:
        return
    i, d, n = tl.arange(0, ROWS), tl.arange(0, D_PAD), tl.arange(0, KEYS)
    query, head = i // Q, group * Q + i % Q
    real = (query < count)[:, None] & (d < D)[None, :]
    q_tile = tl.load(
        q + (token + query)[:, None].to(tl.int64) * q_stride + head[:, None] * D + d[None, :], real, 0.0
    )
    keys += group.to(tl.int64) * head_stride
    values += group.to(tl.int64) * head_stride
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, D_PAD), tl.float32)
    for begin in range(first, last, KEYS):
        at = begin + n
        inside = at < last
        if PAGE == 0:
            rows = (place + at).to(tl.int64)
        elif PAGE % KEYS == 0:
            page = tl.load(table + place.to(tl.int64) * table_stride + begin // PAGE).to(tl.int64)
            rows = page * PAGE + begin % PAGE + n
        else:
            pages = tl.load(table + place.to(tl.int64) * table_stride + at // PAGE, inside, 0)
            rows = pages.to(tl.int64) * PAGE + at % PAGE
        where = rows[:, None] * row_stride + d[None, :]
        some = inside[:, None] & (d < D)[None, :]
        k = tl.load(keys + where, some, 0.0).to(q_tile.dtype)
        v = tl.load(values + where, some, 0.0).to(q_tile.dtype)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale
        seen = inside[None, :] & (at[None, :] <= (position + query)[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen no key yet has no maximum to subtract.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
        best = higher
    if part < 0:
        result = sums / tl.where(total == 0, 1.0, total)[:, None]
        place_out = out + (token + query)[:, None].to(tl.int64) * out_stride + head[:, None] * D + d[None, :]
        tl.store(place_out, result.to(out.dtype.element_ty), real)
    else:
        rows = part.to(tl.int64) * (GROUPS * Q) + head
        tl.store(partial + rows[:, None] * D + d[None, :], sums, real)
        tl.store(statistics + rows * 2, best, query < count)
        tl.store(statistics + rows * 2 + 1, total, query < count)


@triton.jit
def _merge(
    merges, partial, statistics, out, out_stride, heads,
    D: tl.constexpr, D_PAD: tl.constexpr, MERGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch.wait(EARLY)
    head, merge = tl.program_id(0), merges + tl.program_id(1) * MERGE
    parts = tl.load(merge + 2)
    if parts == 0:
        return
    token, first = tl.load(merge).to(tl.int64), tl.load(merge + 1).to(tl.int64)
    d = tl.arange(0, D_PAD)
    best, total = -float("inf"), 0.0
    sums = tl.zeros((D_PAD,), tl.float32)
    for part in range(parts):
        row = (first + part) * heads + head
        theirs, amount = tl.load(statistics + row * 2), tl.load(statistics + row * 2 + 1)
        higher = tl.maximum(best, theirs)
        fade, share = tl.exp2(best - higher), tl.exp2(theirs - higher)
        sums = sums * fade + tl.load(partial + row * D + d, d < D, 0.0) * share
        total = total * fade + amount * share
        best = higher
    tl.store(out + token * out_stride + head * D + d, (sums / total).to(out.dtype.element_ty), d < D)


def attend(
    q_thd: Tensor,
    cache: Cache,
    table: Tensor,
    items: Tensor,
    out_thd: Tensor,
    tile: Tile,
    partial: Tensor | None = None,
    statistics: Tensor | None = None,
) -> None:
    """Run every item; writes the rows of `out_thd` that items without a part name, and the parts.

    Table and items are read before the launch that precedes this one has ended, so that one must not write them.
    `partial` is float32 (parts, H, D), `statistics` (parts, H, 2).
    """
    _, heads, dim = q_thd.shape
    groups = cache.keys.shape[0] if cache.page else cache.keys.shape[1]
    if not len(items):
        return
    _attend[(groups * len(items),)](
        q_thd, cache.keys, cache.values, table, items, out_thd,
        partial if partial is not None else out_thd, statistics if statistics is not None else out_thd,
        q_thd.stride(0), out_thd.stride(0), cache.row, cache.head, table.stride(0),
        math.log2(math.e) / math.sqrt(dim),
        GROUPS=groups, Q=heads // groups, D=dim, D_PAD=max(16, launch.power_of_two(dim)), PAGE=cache.page,
        ROWS=tile.rows, KEYS=tile.keys, ITEM=ITEM, EARLY=launch.early(),
        launch_pdl=launch.early(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def merge(merges: Tensor, partial: Tensor, statistics: Tensor, out_thd: Tensor) -> None:
    """Join the parts of every split sequence into its row of `out_thd`."""
    _, heads, dim = out_thd.shape
    if len(merges):
        _merge[(heads, len(merges))](
            merges, partial, statistics, out_thd, out_thd.stride(0), heads,
            D=dim, D_PAD=launch.power_of_two(dim), MERGE=MERGE, EARLY=launch.early(),
            launch_pdl=launch.early(), num_warps=1,
        )  # fmt: skip


def decode_items(
    lengths: np.ndarray, places: np.ndarray, extra: int, keys: int = DECODE.keys
) -> tuple[np.ndarray, np.ndarray]:
    """(items, merges) of one query per sequence, tokens 0 … B-1: at most B + `extra` items, `extra` merges.

    Sequence b sees `lengths[b]` keys. Long ones are split so that the items are of like size, in tiles of `keys`.
    Those of more than `LONG` times the mean come first, the longest before all, so that what ends last is short;
    the others stay in order, as neighbours may share pages.
    """
    count = len(lengths)
    items, merges = np.zeros((count + extra, ITEM), np.int32), np.zeros((extra, MERGE), np.int32)
    if not count:
        return items, merges
    tokens = np.argsort(np.where(lengths > LONG * lengths.mean(), -lengths, 0), kind="stable")
    lengths, places = lengths[tokens], places[tokens]
    chunk = split_size(lengths, extra, keys) if extra else int(lengths.max())
    splits = -(-lengths // chunk)
    row = np.repeat(np.arange(count), splits)
    starts = np.cumsum(splits) - splits
    within = np.arange(len(row)) - starts[row]
    items[: len(row), 0] = tokens[row]
    items[: len(row), 1] = 1
    items[: len(row), 2] = lengths[row] - 1
    items[: len(row), 3] = within * chunk
    items[: len(row), 4] = np.minimum((within + 1) * chunk, lengths[row])
    items[: len(row), 5] = places[row]
    items[: len(row), 6] = np.where(splits[row] > 1, np.arange(len(row)), -1)
    split = np.flatnonzero(splits > 1)
    items[: len(row), 7] = np.where(splits[row] > 1, np.searchsorted(split, row), -1)
    merges[: len(split), 0] = tokens[split]
    merges[: len(split), 1] = starts[split]
    merges[: len(split), 2] = splits[split]
    return items, merges


def split_size(lengths: np.ndarray, extra: int, keys: int = DECODE.keys) -> int:
    """Most keys of an item, so that sequences of these lengths need at most `extra` items more than there are."""
    # Each sequence has at most one item that it does not fill.
    size = max(LEAST_SPLIT, int(lengths.sum()) // extra + 1)
    return -(-size // keys) * keys


def chunk_items(
    tokens: np.ndarray, counts: np.ndarray, positions: np.ndarray, places: np.ndarray, queries: int
) -> np.ndarray:
    """Items of chunks of consecutive queries: chunk c has `counts[c]` of them from row `tokens[c]` on, the first
    at `positions[c]`; an item takes at most `queries`."""
    blocks = -(-counts // queries)
    chunk = np.repeat(np.arange(len(counts)), blocks)
    offset = (np.arange(len(chunk)) - (np.cumsum(blocks) - blocks)[chunk]) * queries
    items = np.zeros((len(chunk), ITEM), np.int32)
    items[:, 0] = tokens[chunk] + offset
    items[:, 1] = np.minimum(counts[chunk] - offset, queries)
    items[:, 2] = positions[chunk] + offset
    items[:, 4] = items[:, 2] + items[:, 1]
    items[:, 5] = places[chunk]
    items[:, 6] = -1
    return items


def attend_reference(
    q_thd: Tensor, keys_gnsd: Tensor, values_gnsd: Tensor, table: Tensor, places: Tensor, positions: Tensor
) -> Tensor:
    """What the kernels compute, token by token in float32: t sees keys up to `positions[t]` of `places[t]`."""
    out = torch.empty_like(q_thd)
    groups, _, size, dim = keys_gnsd.shape
    for t in range(len(q_thd)):
        length = int(positions[t]) + 1
        pages = table[int(places[t]), : -(-length // size)].long()
        keys = keys_gnsd[:, pages].flatten(1, 2)[:, :length].float()
        values = values_gnsd[:, pages].flatten(1, 2)[:, :length].float()
        queries = q_thd[t].float().view(groups, -1, dim)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / math.sqrt(dim), -1)
        out[t] = (weights @ values).flatten(0, 1).to(q_thd.dtype)
    return out
