"""Which tokens top-k, top-p and min-p keep of each row, without sorting the vocabulary.

The reference is `keep` of `engine.native.sampling`. A row's support is two numbers, a bound and the last id kept of
those equal to it, as `kernels.logits` defines them along with what holds for all functions.

    thresholds    parameters -> bound, tie_last     some ten passes over the rows that truncate
    support_ids   -> ids, counts, bit masks         one pass over the rows that truncate

Shape letters: B rows, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch
from headrace.kernels.logits import BLOCK, divisor_of, is_kept, nan_as_inf, new_rows, read_row, scaled

SCAN_WARPS = 16
"""With this BLOCK, two programs still fit on a multiprocessor."""


class Supports(NamedTuple):
    ids: Tensor
    """int32 (B, capacity): the first ids of the support, rising; those past the count are arbitrary."""
    counts: Tensor
    """int32 (B,): the size of the support, also above the capacity; -1 where a row does not truncate."""
    mask: Tensor
    """int32 (B, ceil(V / 32)): bit i of word w is id 32w + i. Arbitrary where a row does not truncate."""


def thresholds(
    logits_bv: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    block: int = BLOCK,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(bound float32, tie_last int32) of each row."""
    rows, vocab = logits_bv.shape
    out = out or (new_rows(logits_bv, torch.float32), new_rows(logits_bv, torch.int32))
    columns = temperature, top_k, top_p, min_p
    _thresholds[(rows,)](
        logits_bv, logits_bv.stride(0), *columns, *out, VOCAB=vocab, BLOCK=block, num_warps=SCAN_WARPS
    )
    return out


def support_ids(
    logits_bv: Tensor,
    temperature: Tensor,
    bound: Tensor,
    tie_last: Tensor,
    capacity: int,
    *,
    block: int = BLOCK,
    out: Supports | None = None,
) -> Supports:
    """The support of each row that truncates; only the count is written for the others."""
    rows, vocab = logits_bv.shape
    words = launch.blocks(vocab, 32)
    out = out or Supports(*(new_rows(logits_bv, torch.int32, *shape) for shape in ((capacity,), (), (words,))))
    known = logits_bv, logits_bv.stride(0), temperature, bound, tie_last
    _support_ids[(rows,)](*known, *out, capacity, words, VOCAB=vocab, BLOCK=block, num_warps=SCAN_WARPS)
    return out


def expand_support(ids_row: np.ndarray, count: int, mask_row: np.ndarray) -> np.ndarray:
    """All ids of a row that truncates, int32 and rising, from its row of `Supports` on the host."""
    if count <= len(ids_row):
        return ids_row[:count].copy()
    bits = np.unpackbits(np.ascontiguousarray(mask_row, "<i4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)


# ── The search ───────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _thresholds(
    logits, stride, temperature, top_k, top_p, min_p, bound, tie_last, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    greedy = tl.load(temperature + row) == 0
    k = tl.where(greedy, 1, tl.load(top_k + row))
    p = tl.where(greedy, 1.0, tl.load(top_p + row))
    least = tl.load(min_p + row)
    cut = tl.full((), float("-inf"), tl.float32)
    last = tl.full((), -1, tl.int32)
    if (k > 0) | (p < 1.0) | (least > 0.0):
        cut, last = _cut(start, divisor_of(temperature, row), k, p, least, VOCAB, BLOCK)
    tl.store(bound + row, cut)
    tl.store(tie_last + row, last)


@triton.jit
def _cut(start, divisor, k, p, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    highest, lowest = _extremes(start, divisor, VOCAB, BLOCK)
    top = scaled(highest, divisor)
    cut = scaled(lowest, divisor)
    # Of the `ties` tokens equal to the cut, the first `quota` are kept.
    quota = tl.full((), VOCAB, tl.int32)
    ties = tl.full((), 0, tl.int32)
    if (top > float("-inf")) & (top < float("inf")):
        ranked = (k > 0) & (k < VOCAB)
        if ranked:
            # Division keeps the order, so the k-th logit may be sought before it.
            low = tl.where(k == 1, highest, lowest)
            cut = scaled(_search(start, 1.0, top, low, highest, k, VOCAB, False, BLOCK), divisor)
        if ranked | (p < 1.0):
            above, mass, ties = _above(start, divisor, top, cut, VOCAB, BLOCK)
            if ranked:
                quota = tl.minimum(quota, k - above)
            if p < 1.0:
                whole = mass + tl.minimum(quota, ties).to(tl.float64) * tl.exp(cut - top).to(tl.float64)
                goal = whole * p.to(tl.float64)
                # All tokens below this together weigh less than 1 - p.
                low = top + tl.log((1.0 - p) * (whole / VOCAB).to(tl.float32)) - 1.0
                found = _search(start, divisor, top, tl.maximum(cut, low), top, goal, VOCAB, True, BLOCK)
                _, mass, ties = _above(start, divisor, top, found, VOCAB, BLOCK)
                enough = tl.ceil((goal - mass) / tl.exp(found - top).to(tl.float64))
                quota = tl.maximum(tl.minimum(enough, VOCAB).to(tl.int32), 1)
                cut = found
        if least > 0.0:
            floor = top + tl.log(least.to(tl.float64)).to(tl.float32)
            quota = tl.where(floor > cut, VOCAB, quota)
            cut = tl.maximum(cut, floor)
    else:
        # Keeps the tokens that break the row, and none of a row of -inf.
        cut = tl.full((), float("inf"), tl.float32)
    last = tl.full((), VOCAB, tl.int32)
    if quota < ties:
        last = _nth_equal(start, divisor, cut, quota, VOCAB, BLOCK)
    return cut, last


@triton.jit
def _extremes(start, divisor, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest logit and the least whose scaled value is above -inf."""
    high = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
    low = tl.full((BLOCK // 8,), float("inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        _, x = _tile(start, first, VOCAB, BLOCK, 8)
        x = nan_as_inf(x)
        high = tl.maximum(high, tl.max(x, 1))
        low = tl.minimum(low, tl.min(tl.where(scaled(x, divisor) > float("-inf"), x, float("inf")), 1))
    return tl.max(high, 0), tl.min(low, 0)


@triton.jit
def _above(start, divisor, top, at, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many scaled logits are greater than `at`, the sum of their exp(x - top), and how many are equal."""
    above = tl.full((BLOCK // 8,), 0, tl.int32)
    equal = tl.full((BLOCK // 8,), 0, tl.int32)
    mass = tl.full((BLOCK // 8,), 0.0, tl.float64)
    for first in range(0, VOCAB, BLOCK):
        _, x = _tile(start, first, VOCAB, BLOCK, 8)
        x = scaled(x, divisor)
        above += tl.sum((x > at).to(tl.int32), 1)
        equal += tl.sum((x == at).to(tl.int32), 1)
        mass += tl.sum(tl.where(x > at, tl.exp(x - top), 0.0), 1).to(tl.float64)
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def _search(start, divisor, top, low, high, goal, VOCAB: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest of the row's values in [low, high] such that those from it on reach the goal in number or mass.

    `high` is one of the values, and those from `low` on reach the goal. Halving the interval by value is quick
    for logits as they come; halving the count of floats in it, every other time, bounds the steps for any.
    """
    by_value = tl.full((), 1, tl.int32)
    while low < high:
        middle = tl.where(by_value > 0, low * 0.5 + high * 0.5, _middle_float(low, high))
        middle = tl.where(middle > low, middle, high)
        by_value = 1 - by_value
        reached = tl.full((BLOCK // 8,), 0, tl.float64 if MASS else tl.int32)
        least = tl.full((BLOCK // 8,), float("inf"), tl.float32)
        below = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
        for first in range(0, VOCAB, BLOCK):
            _, x = _tile(start, first, VOCAB, BLOCK, 8)
            x = scaled(x, divisor)
            inside = x >= middle
            if MASS:
                reached += tl.sum(tl.where(inside, tl.exp(x - top), 0.0), 1).to(tl.float64)
            else:
                reached += tl.sum(inside.to(tl.int32), 1)
            least = tl.minimum(least, tl.min(tl.where(inside, x, float("inf")), 1))
            below = tl.maximum(below, tl.max(tl.where(inside, float("-inf"), x), 1))
        if tl.sum(reached, 0) >= goal:
            low = tl.min(least, 0)
        else:
            high = tl.max(below, 0)
    return high


@triton.jit
def _middle_float(low, high):
    """The float half way from low to high in the order of all floats, rounded down."""
    a = _ordered(low.to(tl.int32, bitcast=True))
    b = _ordered(high.to(tl.int32, bitcast=True))
    return _ordered((a & b) + ((a ^ b) >> 1)).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(bits):
    """A float's bits as an integer of the same order. Its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _nth_equal(start, divisor, at, nth, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the nth (from 1) scaled logit equal to `at`; there are as many."""
    last = tl.full((), VOCAB, tl.int32)
    first = tl.full((), 0, tl.int32)
    while (nth > 0) & (first < VOCAB):
        ids, x = _tile(start, first, VOCAB, BLOCK, 8)
        equal = (scaled(x, divisor) == at).to(tl.int32)
        groups = tl.sum(equal, 1)
        count = tl.sum(groups, 0)
        if count >= nth:
            rank = (tl.cumsum(groups, 0) - groups)[:, None] + tl.cumsum(equal, 1)
            last = tl.min(tl.min(tl.where((equal > 0) & (rank == nth), ids, VOCAB), 1), 0)
        nth -= count
        first += BLOCK
    return last


# ── The support ──────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _support_ids(
    logits, stride, temperature, bound, tie_last, ids, counts, mask, capacity, words,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, divisor, cut, last = read_row(logits, stride, temperature, bound, tie_last)
    size = tl.full((), -1, tl.int32)
    if cut > float("-inf"):
        size = tl.full((), 0, tl.int32)
        word = tl.arange(0, BLOCK // 32)
        for first in range(0, VOCAB, BLOCK):
            here, x = _tile(start, first, VOCAB, BLOCK, 32)
            kept = is_kept(nan_as_inf(scaled(x, divisor)), here, cut, last).to(tl.int32)
            bits = tl.sum(kept << tl.arange(0, 32)[None, :], 1)
            tl.store(mask + row.to(tl.int64) * words + first // 32 + word, bits, mask=first // 32 + word < words)
            each = tl.sum(kept, 1)
            count = tl.sum(each, 0)
            if count > 0:
                place = size + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(kept, 1) - kept
                tl.store(ids + row.to(tl.int64) * capacity + place, here, mask=(kept > 0) & (place < capacity))
            size += count
    tl.store(counts + row, size)


@triton.jit
def _tile(start, first, VOCAB: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """(BLOCK / WIDTH, WIDTH) consecutive ids and their logits in float32, -inf past the end."""
    ids = first + tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return ids, tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
