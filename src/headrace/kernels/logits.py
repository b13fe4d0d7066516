"""From logits to tokens, log-probs and supports, without sorting the vocabulary or reading anything back.

The distribution is the one defined in `engine.native.sampling`, which is also the reference. A row's support is
two numbers: a token is kept if its scaled logit is above `bound`, or equal to it with an id of at most
`tie_last`. A row that does not truncate has bound -inf and tie_last -1; every other row a greater bound.

    thresholds    parameters -> bound, tie_last      some ten passes over the rows that truncate
    block_stats   -> maximum and sum of each block   one pass
    pick, score   -> log-prob of a token             the blocks' statistics, and one block to pick from
    support_ids   -> ids, counts, bit masks          one pass over the rows that truncate

Every function launches one kernel of static shape, waits for nothing and may be captured in a CUDA graph. Equal
input gives equal bits: sums have a fixed order and a row's result does not depend on the others. `block_stats`,
`pick` and `score` also do not depend on the dtype, stride or alignment that hold the same logits, and a logit
of -inf counts exactly as one outside the bound. A row with a NaN or +inf logit, or nothing but -inf, has log-prob
NaN and an arbitrary token. Logits are bfloat16, float16 or float32 with contiguous rows of any stride; a
parameter may be longer than the batch. All functions of one row need the same `block`, a power of two.

Shape letters: B rows, V vocabulary, N blocks of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
SCAN_WARPS = 16
"""Of `thresholds` and `support_ids`: with this BLOCK, two programs still fit on a multiprocessor."""
SAME_ARITHMETIC = {"num_warps": 8, "enable_fp_fusion": False}
"""How `pick` and `score` are compiled, so that the code they share gives the same bits in both."""


class Supports(NamedTuple):
    ids: Tensor
    """int32 (B, capacity): the first ids of the support, rising; those past the count are arbitrary."""
    counts: Tensor
    """int32 (B,): the size of the support, also above the capacity; -1 where a row does not truncate."""
    mask: Tensor
    """int32 (B, ceil(V / 32)): bit i of word w is id 32w + i. Arbitrary where a row does not truncate."""


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

        blocks = triton.cdiv(vocab, block)
        self._block = block
        self._no_bounds = buffer(torch.float32).fill_(-torch.inf), buffer(torch.int32).fill_(-1)
        self._bounds = buffer(torch.float32), buffer(torch.int32)
        self._stats = buffer(torch.float32, blocks), buffer(torch.float32, blocks)
        self._picked = buffer(torch.int32), buffer(torch.float32)
        self._supports = Supports(
            buffer(torch.int32, capacity), buffer(torch.int32), buffer(torch.int32, triton.cdiv(vocab, 32))
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
    out = out or (_empty(logits_bv, torch.float32), _empty(logits_bv, torch.int32))
    columns = temperature, top_k, top_p, min_p
    _thresholds[(rows,)](
        logits_bv, logits_bv.stride(0), *columns, *out, VOCAB=vocab, BLOCK=block, num_warps=SCAN_WARPS
    )
    return out


def block_stats(
    logits_bv: Tensor,
    temperature: Tensor,
    bound: Tensor,
    tie_last: Tensor,
    *,
    block: int = BLOCK,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, N) float32 each: greatest kept scaled logit x̂ of each block, and Σ exp(x - x̂) over its kept ones.

    -inf and 0 where nothing is kept; +inf and NaN where a kept one is NaN or +inf.
    """
    rows, vocab = logits_bv.shape
    blocks = triton.cdiv(vocab, block)
    out = out or (_empty(logits_bv, torch.float32, blocks), _empty(logits_bv, torch.float32, blocks))
    _block_stats[(rows, blocks)](
        logits_bv, logits_bv.stride(0), temperature, bound, tie_last, *out, VOCAB=vocab, BLOCK=block, num_warps=4
    )
    return out


def pick(
    logits_bv: Tensor,
    temperature: Tensor,
    bound: Tensor,
    tie_last: Tensor,
    block_max: Tensor,
    block_sum: Tensor,
    uniform: Tensor,
    slots: Tensor,
    last_token: Tensor,
    *,
    block: int = BLOCK,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(token int32, log-prob float32) of each row, by inverse CDF at `uniform`, never one of probability zero.

    Also writes the token to `last_token[slots[b]]` where that slot is not negative.
    """
    rows, vocab = logits_bv.shape
    blocks = block_max.shape[1]
    out = out or (_empty(logits_bv, torch.int32), _empty(logits_bv, torch.float32))
    known = logits_bv, logits_bv.stride(0), temperature, bound, tie_last, block_max, block_sum, blocks
    sizes = {"VOCAB": vocab, "BLOCK": block, "BLOCKS": triton.next_power_of_2(blocks)}
    _pick[(rows,)](*known, uniform, slots, last_token, *out, **sizes, **SAME_ARITHMETIC)
    return out


def score(
    logits_bv: Tensor,
    temperature: Tensor,
    bound: Tensor,
    tie_last: Tensor,
    block_max: Tensor,
    block_sum: Tensor,
    targets: Tensor,
) -> Tensor:
    """Log-prob (B,) float32 of given tokens: the very bits of `pick`. -inf for a target that is not kept."""
    rows, blocks = block_max.shape
    logprobs = _empty(logits_bv, torch.float32)
    known = logits_bv, logits_bv.stride(0), temperature, bound, tie_last, block_max, block_sum, blocks
    _score[(rows,)](*known, targets, logprobs, BLOCKS=triton.next_power_of_2(blocks), **SAME_ARITHMETIC)
    return logprobs


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
    words = triton.cdiv(vocab, 32)
    out = out or Supports(*(_empty(logits_bv, torch.int32, *shape) for shape in ((capacity,), (), (words,))))
    known = logits_bv, logits_bv.stride(0), temperature, bound, tie_last
    _support_ids[(rows,)](*known, *out, capacity, words, VOCAB=vocab, BLOCK=block, num_warps=SCAN_WARPS)
    return out


def expand_support(ids_row: np.ndarray, count: int, mask_row: np.ndarray) -> np.ndarray:
    """All ids of a row that truncates, int32 and rising, from its row of `Supports` on the host."""
    if count <= len(ids_row):
        return ids_row[:count].copy()
    bits = np.unpackbits(np.ascontiguousarray(mask_row, "<i4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)


def _empty(logits_bv: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(len(logits_bv), *shape, dtype=dtype, device=logits_bv.device)


@triton.jit
def _scaled(x, divisor):
    # Most runs sample at temperature 1, and a correctly rounded division costs more than all the rest.
    if divisor != 1.0:
        x = tl.div_rn(x, divisor)
    return x


@triton.jit
def _divisor(temperature, row):
    heat = tl.load(temperature + row)
    return tl.where(heat == 0, 1.0, heat)


@triton.jit
def _nan_as_inf(x):
    return tl.where(x != x, float("inf"), x)


@triton.jit
def _kept(x, ids, bound, tie_last):
    return (x > bound) | ((x == bound) & (ids <= tie_last))


@triton.jit
def _tile(start, first, VOCAB: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """(BLOCK / WIDTH, WIDTH) consecutive ids and their logits in float32, -inf past the end."""
    ids = first + tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return ids, tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)


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
        cut, last = _cut(start, _divisor(temperature, row), k, p, least, VOCAB, BLOCK)
    tl.store(bound + row, cut)
    tl.store(tie_last + row, last)


@triton.jit
def _cut(start, divisor, k, p, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    highest, lowest = _extremes(start, divisor, VOCAB, BLOCK)
    top = _scaled(highest, divisor)
    cut = _scaled(lowest, divisor)
    # Of the `ties` tokens equal to the cut, the first `quota` are kept.
    quota = tl.full((), VOCAB, tl.int32)
    ties = tl.full((), 0, tl.int32)
    if (top > float("-inf")) & (top < float("inf")):
        ranked = (k > 0) & (k < VOCAB)
        if ranked:
            # Division keeps the order, so the k-th logit may be sought before it.
            low = tl.where(k == 1, highest, lowest)
            cut = _scaled(_search(start, 1.0, top, low, highest, k, VOCAB, False, BLOCK), divisor)
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
        x = _nan_as_inf(x)
        high = tl.maximum(high, tl.max(x, 1))
        low = tl.minimum(low, tl.min(tl.where(_scaled(x, divisor) > float("-inf"), x, float("inf")), 1))
    return tl.max(high, 0), tl.min(low, 0)


@triton.jit
def _above(start, divisor, top, at, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many scaled logits are greater than `at`, the sum of their exp(x - top), and how many are equal."""
    above = tl.full((BLOCK // 8,), 0, tl.int32)
    equal = tl.full((BLOCK // 8,), 0, tl.int32)
    mass = tl.full((BLOCK // 8,), 0.0, tl.float64)
    for first in range(0, VOCAB, BLOCK):
        _, x = _tile(start, first, VOCAB, BLOCK, 8)
        x = _scaled(x, divisor)
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
            x = _scaled(x, divisor)
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
        equal = (_scaled(x, divisor) == at).to(tl.int32)
        groups = tl.sum(equal, 1)
        count = tl.sum(groups, 0)
        if count >= nth:
            rank = (tl.cumsum(groups, 0) - groups)[:, None] + tl.cumsum(equal, 1)
            last = tl.min(tl.min(tl.where((equal > 0) & (rank == nth), ids, VOCAB), 1), 0)
        nth -= count
        first += BLOCK
    return last


# A kernel specialised on alignment would load wider pieces per thread and so sum in another order. The engine's
# logits and the trainer's may differ in alignment and must not in their log-probs.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits"])
def _block_stats(
    logits, stride, temperature, bound, tie_last, block_max, block_sum,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    divisor = _divisor(temperature, row)
    cut = tl.load(bound + row)
    last = tl.load(tie_last + row)
    x = _kept_block(start, tl.program_id(1), divisor, cut, last, VOCAB, BLOCK)
    highest = tl.max(x, 0)
    weights = tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest))
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(block_max + at, highest)
    tl.store(block_sum + at, tl.sum(weights, 0))


@triton.jit
def _kept_block(start, block, divisor, bound, tie_last, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK,) scaled logits, -inf where not kept."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(start + ids, mask=ids < VOCAB, other=float("-inf")).to(tl.float32)
    x = _nan_as_inf(_scaled(x, divisor))
    return tl.where(_kept(x, ids, bound, tie_last), x, float("-inf"))


@triton.jit
def _combine(block_max, block_sum, row, blocks, BLOCKS: tl.constexpr):
    """Greatest scaled logit m of a row, each block's Σ exp(x - m), and the sum of those; in float64."""
    index = tl.arange(0, BLOCKS)
    at = row.to(tl.int64) * blocks + index
    maxima = tl.load(block_max + at, mask=index < blocks, other=float("-inf"))
    sums = tl.load(block_sum + at, mask=index < blocks, other=0.0)
    highest = tl.max(maxima, 0)
    weights = (sums * tl.exp(maxima - highest)).to(tl.float64)
    return highest, weights, tl.sum(weights, 0)


@triton.jit
def _logprob(start, token, divisor, bound, tie_last, highest, total):
    x = _nan_as_inf(_scaled(tl.load(start + token).to(tl.float32), divisor))
    x = tl.where(_kept(x, token, bound, tie_last), x, float("-inf"))
    return (x - highest) - tl.log(total.to(tl.float32))


@triton.jit
def _inverse_cdf(weights, target, SIZE: tl.constexpr):
    """The first index, never of weight 0, whose running sum exceeds the target; and how far into it, in [0, 1)."""
    index = tl.arange(0, SIZE)
    running = tl.cumsum(weights, 0)
    # A parallel sum may rise by a rounding where nothing is added, and its end may round below the target.
    first = tl.min(tl.where((running > target) & (weights > 0.0), index, SIZE), 0)
    last = tl.max(tl.where(weights > 0.0, index, 0), 0)
    chosen = tl.minimum(first, last)
    weight = tl.sum(tl.where(index == chosen, weights, 0.0), 0)
    before = tl.sum(tl.where(index == chosen, running, 0.0), 0) - weight
    return chosen, (target - before) / weight


@triton.jit(
    do_not_specialize=["stride", "blocks"], do_not_specialize_on_alignment=["logits", "block_max", "block_sum"]
)
def _pick(
    logits, stride, temperature, bound, tie_last, block_max, block_sum, blocks, uniform, slots, last_token,
    tokens, logprobs, VOCAB: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    divisor = _divisor(temperature, row)
    cut = tl.load(bound + row)
    last = tl.load(tie_last + row)
    highest, weights, total = _combine(block_max, block_sum, row, blocks, BLOCKS)
    block, within = _inverse_cdf(weights, tl.load(uniform + row) * total, BLOCKS)
    block_highest = tl.load(block_max + row.to(tl.int64) * blocks + block)
    inner = tl.exp(_kept_block(start, block, divisor, cut, last, VOCAB, BLOCK) - block_highest).to(tl.float64)
    place, _ = _inverse_cdf(inner, within * tl.sum(inner, 0), BLOCK)
    token = block * BLOCK + place
    tl.store(tokens + row, token)
    tl.store(logprobs + row, _logprob(start, token, divisor, cut, last, highest, total))
    slot = tl.load(slots + row)
    tl.store(last_token + slot, token, mask=slot >= 0)


@triton.jit(
    do_not_specialize=["stride", "blocks"], do_not_specialize_on_alignment=["logits", "block_max", "block_sum"]
)
def _score(
    logits, stride, temperature, bound, tie_last, block_max, block_sum, blocks, targets, logprobs,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    divisor = _divisor(temperature, row)
    cut = tl.load(bound + row)
    last = tl.load(tie_last + row)
    highest, _, total = _combine(block_max, block_sum, row, blocks, BLOCKS)
    tl.store(logprobs + row, _logprob(start, tl.load(targets + row), divisor, cut, last, highest, total))


@triton.jit
def _support_ids(
    logits, stride, temperature, bound, tie_last, ids, counts, mask, capacity, words,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    divisor = _divisor(temperature, row)
    cut = tl.load(bound + row)
    last = tl.load(tie_last + row)
    size = tl.full((), -1, tl.int32)
    if cut > float("-inf"):
        size = tl.full((), 0, tl.int32)
        word = tl.arange(0, BLOCK // 32)
        for first in range(0, VOCAB, BLOCK):
            here, x = _tile(start, first, VOCAB, BLOCK, 32)
            kept = _kept(_nan_as_inf(_scaled(x, divisor)), here, cut, last).to(tl.int32)
            bits = tl.sum(kept << tl.arange(0, 32)[None, :], 1)
            tl.store(mask + row * words + first // 32 + word, bits, mask=first // 32 + word < words)
            each = tl.sum(kept, 1)
            count = tl.sum(each, 0)
            if count > 0:
                place = size + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(kept, 1) - kept
                tl.store(ids + row * capacity + place, here, mask=(kept > 0) & (place < capacity))
            size += count
    tl.store(counts + row, size)
