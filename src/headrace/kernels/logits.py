"""From logits to tokens and their log-probs, within a bound.

The distribution is the one defined in `engine.native.sampling`, which is also the reference. What a row keeps is
two numbers, found by `kernels.truncation`: a token is kept if its scaled logit is above `bound`, or equal to it
with an id of at most `tie_last`. A row that does not truncate has bound -inf and tie_last -1; every other row a
greater bound.

    block_stats   -> maximum and sum of each block   one pass
    pick          -> a token and its log-prob        the blocks' statistics, and one block to pick from
    score         -> the log-prob of a given token   the blocks' statistics

Every function, here and in `kernels.truncation`, launches one kernel of static shape, waits for nothing and may be
captured in a CUDA graph. Equal input gives equal bits: sums have a fixed order and a row's result does not depend
on the others. Those here also do not depend on the dtype, stride or alignment that hold the same logits, and a
logit of -inf counts exactly as one outside the bound. A row with a NaN or +inf logit, or nothing but -inf, has
log-prob NaN and an arbitrary token. Logits are bfloat16, float16 or float32 with contiguous rows of any stride; a
parameter may be longer than the batch. All functions of one row need the same `block`, a power of two.

Shape letters: B rows, V vocabulary, N blocks of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

BLOCK = 4096
SAME_ARITHMETIC = {"num_warps": 8, "enable_fp_fusion": False}
"""How `pick` and `score` are compiled, so that the code they share gives the same bits in both."""


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
    blocks = launch.blocks(vocab, block)
    out = out or (new_rows(logits_bv, torch.float32, blocks), new_rows(logits_bv, torch.float32, blocks))
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
    out = out or (new_rows(logits_bv, torch.int32), new_rows(logits_bv, torch.float32))
    known = logits_bv, logits_bv.stride(0), temperature, bound, tie_last, block_max, block_sum, blocks
    sizes = {"VOCAB": vocab, "BLOCK": block, "BLOCKS": launch.power_of_two(blocks)}
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
    logprobs = new_rows(logits_bv, torch.float32)
    known = logits_bv, logits_bv.stride(0), temperature, bound, tie_last, block_max, block_sum, blocks
    _score[(rows,)](*known, targets, logprobs, BLOCKS=launch.power_of_two(blocks), **SAME_ARITHMETIC)
    return logprobs


def new_rows(logits_bv: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """(B, *shape), not filled, where the logits are."""
    return torch.empty(len(logits_bv), *shape, dtype=dtype, device=logits_bv.device)


# ── How every kernel reads a row ─────────────────────────────────────────────────────────────────────────


@triton.jit
def read_row(logits, stride, temperature, bound, tie_last):
    """This program's row: its number, its first logit's place, its divisor, its bound and its last tie."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    return row, start, divisor_of(temperature, row), tl.load(bound + row), tl.load(tie_last + row)


@triton.jit
def divisor_of(temperature, row):
    """Greedy rows keep their logits as they are."""
    heat = tl.load(temperature + row)
    return tl.where(heat == 0, 1.0, heat)


@triton.jit
def scaled(x, divisor):
    # Most runs sample at temperature 1, and a correctly rounded division costs more than all the rest.
    if divisor != 1.0:
        x = tl.div_rn(x, divisor)
    return x


@triton.jit
def nan_as_inf(x):
    return tl.where(x != x, float("inf"), x)


@triton.jit
def is_kept(x, ids, bound, tie_last):
    return (x > bound) | ((x == bound) & (ids <= tie_last))


# ── Statistics, picking, scoring ─────────────────────────────────────────────────────────────────────────


# A kernel specialised on alignment would load wider pieces per thread and so sum in another order. The engine's
# logits and the trainer's may differ in alignment and must not in their log-probs.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["logits"])
def _block_stats(
    logits, stride, temperature, bound, tie_last, block_max, block_sum,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start, divisor, cut, last = read_row(logits, stride, temperature, bound, tie_last)
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
    x = nan_as_inf(scaled(x, divisor))
    return tl.where(is_kept(x, ids, bound, tie_last), x, float("-inf"))


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
    x = nan_as_inf(scaled(tl.load(start + token).to(tl.float32), divisor))
    x = tl.where(is_kept(x, token, bound, tie_last), x, float("-inf"))
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
    row, start, divisor, cut, last = read_row(logits, stride, temperature, bound, tie_last)
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
    row, start, divisor, cut, last = read_row(logits, stride, temperature, bound, tie_last)
    highest, _, total = _combine(block_max, block_sum, row, blocks, BLOCKS)
    tl.store(logprobs + row, _logprob(start, tl.load(targets + row), divisor, cut, last, highest, total))
