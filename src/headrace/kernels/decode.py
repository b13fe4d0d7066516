"""Attention of single queries over pages by Triton and Hopper's copy engine; the engine uses it for float8 caches.

Written for few instructions: tiles of keys and values come by the copy engine, and keys are the rows of the product
with the queries, of which there are seldom more than eight for a key head:

    scores (KEYS, Q) = keys (KEYS, D) · queries (D, Q)         sums (D, Q) += valuesᵀ (D, KEYS) · weights (KEYS, Q)

Items, merges and the reference are those of `kernels.attention`. Shape letters as there; Q is padded. Caches in
bfloat16 have a kernel of their own, `kernels.hopper_decode`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels import launch
from headrace.kernels.attention import ITEM, Cache

MOST_KEYS = 64
END = 16
"""Keys of the tiles at a sequence's end, where they do not fill a whole one and must be masked."""
WARPS, STAGES = 1, 3
LEAST_QUERIES = 8
"""What the tensor cores compute in any case."""


def tile_keys(page: int) -> int:
    """Keys of a tile where pages hold so many tokens; 0: this kernel cannot serve them."""
    keys = min(page, MOST_KEYS)
    return keys if keys >= END and keys & (keys - 1) == 0 and page % keys == 0 else 0


def serves(q_thd: Tensor, cache: Cache) -> bool:
    """Whether `attend_single` can take the place of `attention.attend` for items of single queries."""
    if q_thd.is_cuda and torch.cuda.get_device_capability(q_thd.device)[0] < 9:
        return False
    whole_lines = cache.row * cache.keys.element_size() % 16 == 0
    return bool(cache.page and tile_keys(cache.page)) and whole_lines and q_thd.dtype.itemsize == 2


def attend_single(
    q_thd: Tensor,
    cache: Cache,
    table: Tensor,
    items: Tensor,
    out_thd: Tensor,
    partial: Tensor | None = None,
    statistics: Tensor | None = None,
) -> None:
    """As `attention.attend`, for items of one query each, made for tiles of `tile_keys(cache.page)`."""
    _, heads, dim = q_thd.shape
    groups, keys = cache.keys.shape[0], tile_keys(cache.page)
    dim_pad = max(16, launch.power_of_two(dim))
    rows = cache.keys.view(-1, dim), cache.values.view(-1, dim)
    # The device widens float8 to float16; to bfloat16 would take several instructions for each number.
    widened = cache.keys.element_size() == 1 or q_thd.dtype == torch.float16
    _attend_single[(groups * len(items),)](
        q_thd,
        *(TensorDescriptor.from_tensor(one, [size, dim_pad]) for size in (keys, END) for one in rows),
        table, items, out_thd,
        partial if partial is not None else out_thd, statistics if statistics is not None else out_thd,
        q_thd.stride(0), out_thd.stride(0), cache.head // dim, table.stride(0), math.log2(math.e) / math.sqrt(dim),
        GROUPS=groups, Q=heads // groups, Q_PAD=max(LEAST_QUERIES, launch.power_of_two(heads // groups)),
        D=dim, D_PAD=dim_pad, PAGE=cache.page, KEYS=keys, END=END,
        DTYPE=tl.float16 if widened else tl.bfloat16, ITEM=ITEM, EARLY=launch.early(),
        launch_pdl=launch.early(), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@triton.jit
def _attend_single(
    q, keys, values, end_keys, end_values, table, items, out, partial, statistics,
    q_stride, out_stride, head_rows, table_stride, scale,
    GROUPS: tl.constexpr, Q: tl.constexpr, Q_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr, END: tl.constexpr, DTYPE: tl.constexpr, ITEM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    group, item = tl.program_id(0) % GROUPS, items + tl.program_id(0) // GROUPS * ITEM
    # Neither items nor table are written by the launch before this one, so they need not wait for it.
    token, count = tl.load(item), tl.load(item + 1)
    first, last, place, part = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    whole = last - (last - first) % KEYS
    launch.wait(EARLY)
    if count == 0:
        return
    j, d, n = tl.arange(0, Q_PAD), tl.arange(0, D_PAD), tl.arange(0, END)
    head = group * Q + j
    real = (j < Q)[:, None] & (d < D)[None, :]
    queries = tl.load(q + token.to(tl.int64) * q_stride + head[:, None] * D + d[None, :], real, 0.0)
    q_dq = tl.trans(queries.to(DTYPE))
    pages = table + place.to(tl.int64) * table_stride
    best = tl.full((Q_PAD,), -float("inf"), tl.float32)
    total = tl.zeros((Q_PAD,), tl.float32)
    sums = tl.zeros((D_PAD, Q_PAD), tl.float32)
    for begin in range(first, whole, KEYS):
        row = group * head_rows + tl.load(pages + begin // PAGE) * PAGE + begin % PAGE
        k, v = keys.load([row, 0]).to(DTYPE), values.load([row, 0]).to(DTYPE)
        best, total, sums = _with_tile(tl.dot(k, q_dq, input_precision="ieee"), v, best, total, sums, scale)
    if whole < last:
        row = group * head_rows + tl.load(pages + whole // PAGE) * PAGE + whole % PAGE
        k, v = keys.load([row, 0]).to(DTYPE), values.load([row, 0]).to(DTYPE)
        inside = (whole + tl.arange(0, KEYS) < last)[:, None]
        scores = tl.where(inside, tl.dot(k, q_dq, input_precision="ieee"), -float("inf"))
        then_best, then_total, then_sums = _with_tile(scores, v, best, total, sums, scale)
        if tl.max(tl.max((then_sums != then_sums).to(tl.int32), 1), 0) == 0:
            best, total, sums = then_best, then_total, then_sums
        else:
            # Behind the sequence's end lies what another one left, perhaps no number, and 0 times that is none.
            for begin in range(whole, last, END):
                row = group * head_rows + tl.load(pages + begin // PAGE) * PAGE + begin % PAGE
                real_keys = (begin + n < last)[:, None]
                k_end, v_end = end_keys.load([row, 0]).to(DTYPE), end_values.load([row, 0])
                v_end = tl.where(real_keys, v_end, 0.0).to(DTYPE)
                some = tl.where(real_keys, tl.dot(k_end, q_dq, input_precision="ieee"), -float("inf"))
                best, total, sums = _with_tile(some, v_end, best, total, sums, scale)
    if part < 0:
        place_out = out + token.to(tl.int64) * out_stride + head[:, None] * D + d[None, :]
        tl.store(place_out, tl.trans(sums / total[None, :]).to(out.dtype.element_ty), real)
    else:
        rows = part.to(tl.int64) * (GROUPS * Q) + head
        tl.store(partial + rows[:, None] * D + d[None, :], tl.trans(sums), real)
        tl.store(statistics + rows * 2, best * scale, j < Q)
        tl.store(statistics + rows * 2 + 1, total, j < Q)


@triton.jit
def _with_tile(scores, v, best, total, sums, scale):
    """The running maximum, weight and weighted sum with one more tile of keys; scores are not yet scaled."""
    higher = tl.maximum(best, tl.max(scores, 0))
    weights = tl.exp2(scores * scale - (higher * scale)[None, :])
    fade = tl.exp2((best - higher) * scale)
    total = total * fade + tl.sum(weights, 0)
    sums = tl.dot(tl.trans(v), weights.to(v.dtype), sums * fade[None, :], input_precision="ieee")
    return higher, total, sums
