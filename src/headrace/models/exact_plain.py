"""Forward passes in plain PyTorch on the CPU, in which a row's result is the same bits in any batch.

Everything is made of operations that round each element correctly, of `exp` and `log`, and of products of matrices
of one shape. Not used, because they were seen to depend on a row's neighbours or on the number of threads: `silu`
and `sigmoid` (the last elements of a vector are computed another way), `exp2` (likewise), `sum` over one long row,
and products whose sizes are no multiples of 16. Sums are by halving.

A library's product may compute the last rows of a matrix by other instructions than the rest, and cut long sums by
the number of threads: MKL does so with AVX2, and from 1,024 features on with AVX-512 too. So every product here is
one thread's, and has a number of rows that this machine's library was seen to treat alike.

Shape letters: M rows, N columns, K in features, T tokens, H query heads, G key/value heads, Q = H / G, D head size,
W items of attention, R query rows of an item, X rows of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.errors import HeadraceError
from headrace.models.attention import Spans
from headrace.models.logprobs import Score
from headrace.models.ops import Rotation

ROWS = (32, 48, 24, 16)
"""Candidates for a product's rows. Measured with AVX-512: 16 is a fifth slower than 32 for many rows, 48 a third
slower for a single one."""
TRIED = ((16, 16), (64, 48), (256, 192), (1024, 64))
"""Features and columns of the products by which a number of rows is tried."""
GRAIN = 16
"""What sizes of matrices are padded to a multiple of."""
KEYS = 64
"""Keys of a step of attention."""
score: Score | None = None
"""The log-softmax was seen not to depend on other rows."""


def linear(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None) -> Tensor:
    """(M, N), new, in x's dtype: x @ weightᵀ + bias, computed in float32."""
    (rows, depth), columns, block = x_mk.shape, weight_nk.shape[0], block_rows()
    x_pad = x_mk.new_zeros(_padded(rows, block), _padded(depth, GRAIN), dtype=torch.float32)
    x_pad[:rows, :depth] = x_mk
    weight_kn = _pad(weight_nk.float(), _padded(columns, GRAIN), x_pad.shape[1]).t()
    out = x_pad.new_empty(x_pad.shape[0], weight_kn.shape[1])
    with one_thread():
        for first in range(0, x_pad.shape[0], block):
            torch.mm(x_pad[first : first + block], weight_kn, out=out[first : first + block])
    out = out[:rows, :columns]
    if bias_n is not None:
        out = out + bias_n.float()
    return out.to(x_mk.dtype).contiguous()


@cache
def block_rows() -> int:
    """Rows of every product: the first of ROWS whose rows all get the same bits from the same numbers here."""
    for rows in ROWS:
        if all(_treats_rows_alike(rows, depth, columns) for depth, columns in TRIED):
            return rows
    raise HeadraceError(
        'numerics = "exact" on a CPU needs matrix products whose rows do not depend on their place',
        f"none of {', '.join(map(str, ROWS))} rows with this machine's library",
        'set engine.numerics = "fast" and training.numerics = "fast", or run on a GPU',
    )


def _treats_rows_alike(rows: int, depth: int, columns: int) -> bool:
    draw = torch.Generator().manual_seed(0)
    weight_kn = torch.randn(columns, depth, generator=draw).t()
    with one_thread(), torch.no_grad():
        for row_k in torch.randn(4, depth, generator=draw):
            out_rn = torch.mm(row_k.repeat(rows, 1), weight_kn)
            if not torch.equal(out_rn, out_rn[:1].expand_as(out_rn)):
                return False
    return True


@contextmanager
def one_thread() -> Iterator[None]:
    """Products in here are one thread's, whatever the number of threads is. Changing it takes a tenth of a
    microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    scale = (total(x32 * x32) / x.shape[-1] + eps).sqrt().reciprocal()
    return (x32 * scale[..., None]).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    gate32 = gate.float()
    return (gate32 / (torch.exp(-gate32) + 1)).to(gate.dtype) * up


def rotate(q_thd: Tensor, k_tgd: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    cos, sin, q_norm, k_norm, eps = rotation
    if q_norm is not None and k_norm is not None:
        q_thd, k_tgd = rms_norm(q_thd, q_norm, eps), rms_norm(k_tgd, k_norm, eps)
    half = q_thd.shape[-1] // 2
    # No addcmul: whether it rounds once or twice may depend on the place in a vector.
    return q_thd * cos + q_thd.roll(half, -1) * sin, k_tgd * cos + k_tgd.roll(half, -1) * sin


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension, by halving."""
    width = x.shape[-1]
    if width & (width - 1):
        x = F.pad(x, (0, (1 << width.bit_length()) - width))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────


class Blocks(NamedTuple):
    """The work of one pass: items of a few queries each, those with the most keys first."""

    queries: Tensor
    """(W, queries) rows of the pass; the last is repeated as padding."""
    real: Tensor
    """(W, queries) false at padding."""
    positions: Tensor
    """(W, R) of each query row, all heads that share a key head together."""
    sequence: Tensor
    """(W,) row of `key_rows`."""
    key_rows: Tensor
    """(sequences, keys, padded to whole blocks): where each key of the first head lies."""
    head_step: int
    """Rows from a key to that of the next head."""
    per_group: int
    """Q."""
    reaching: list[int]
    """For each block of keys, how many items see any of it."""


def plan(spans: Spans, heads: int, groups: int, device: torch.device) -> Blocks:
    """For keys (X, G, D) whose every sequence lies in consecutive rows."""
    longest = int((spans.positions + spans.counts).max())
    own = np.minimum(np.arange(_padded(longest, KEYS)), (spans.positions + spans.counts - 1)[:, None])
    return blocks(spans, (spans.places[:, None] + own) * groups, 1, heads // groups, device)


def blocks(spans: Spans, key_rows: np.ndarray, head_step: int, per_group: int, device: torch.device) -> Blocks:
    """For keys wherever `key_rows` says; see `Blocks`. A row of it for each span, whose `places` are not read."""
    rows = _padded(per_group, GRAIN)
    width = rows // per_group
    items = -(-spans.counts // width)
    span = np.repeat(np.arange(len(items)), items)
    first = (np.arange(len(span)) - (np.cumsum(items) - items)[span]) * width
    needed = -(-(spans.positions[span] + np.minimum(first + width, spans.counts[span])) // KEYS)
    order = np.argsort(-needed, kind="stable")
    span, first, needed = span[order], first[order], needed[order]
    offsets = first[:, None] + np.arange(width)
    own = np.minimum(offsets, spans.counts[span][:, None] - 1)
    positions = np.repeat(spans.positions[span][:, None] + own, per_group, 1)
    positions = np.pad(positions, ((0, 0), (0, rows - positions.shape[1])), mode="edge")

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Blocks(
        queries=there(spans.tokens[span][:, None] + own),
        real=there(offsets < spans.counts[span][:, None]),
        positions=there(positions),
        sequence=there(span),
        key_rows=there(key_rows),
        head_step=head_step,
        per_group=per_group,
        reaching=[int((needed > block).sum()) for block in range(int(needed.max()))],
    )


def attend(q_thd: Tensor, keys: Tensor, values: Tensor, work: Blocks) -> Tensor:
    """(T, H, D). Keys and values are contiguous in any shape (…, D) that `work` was planned for.

    Softmax over blocks of keys at fixed places, in order: what a block adds that a query does not see is zero.
    """
    tokens, heads, dim = q_thd.shape
    groups = heads // work.per_group
    keys_xd, values_xd = keys.reshape(-1, dim), values.reshape(-1, dim)
    head_rows = torch.arange(groups, device=q_thd.device)[None, :, None] * work.head_step
    q_wgrd = _query_rows(q_thd, work, groups)
    best = q_wgrd.new_full(q_wgrd.shape[:3], -math.inf)
    weight, sums = torch.zeros_like(best), torch.zeros_like(q_wgrd)
    for block, some in enumerate(work.reaching):
        here = slice(block * KEYS, (block + 1) * KEYS)
        index = (work.key_rows[work.sequence[:some], None, here] + head_rows).flatten()
        k, v = (_pad(x.index_select(0, index).float(), None, q_wgrd.shape[3]) for x in (keys_xd, values_xd))
        k, v = (x.view(some * groups, KEYS, -1) for x in (k, v))
        with one_thread():
            scores = torch.bmm(q_wgrd[:some].flatten(0, 1), k.transpose(1, 2)).view(some, groups, -1, KEYS)
        at = torch.arange(here.start, here.stop, device=q_thd.device)
        unseen = at > work.positions[:some, None, :, None]
        scores = (scores / math.sqrt(dim)).masked_fill_(unseen, -math.inf)
        higher = torch.maximum(best[:some], scores.amax(-1))
        fade = torch.exp(best[:some] - higher)
        shares = torch.exp(scores - higher[..., None])
        with one_thread():
            added = torch.bmm(shares.flatten(0, 1), v).view(some, groups, *q_wgrd.shape[2:])
        best[:some] = higher
        weight[:some] = weight[:some] * fade + total(shares)
        sums[:some] = sums[:some] * fade[..., None] + added
    count, width = work.queries.shape
    attended = (sums / weight[..., None])[:, :, : width * work.per_group, :dim]
    attended = attended.reshape(count, groups, width, work.per_group, dim).transpose(1, 2)
    out_tgqd = q_thd.new_empty(tokens, groups, work.per_group, dim)
    out_tgqd[work.queries[work.real]] = attended[work.real].to(q_thd.dtype)
    return out_tgqd.view(tokens, heads, dim)


def _query_rows(q_thd: Tensor, work: Blocks, groups: int) -> Tensor:
    """(W, G, R, D) in float32, R and D padded with zeros."""
    tokens, _, dim = q_thd.shape
    q_wngqd = q_thd.reshape(tokens, groups, work.per_group, dim)[work.queries].float()
    return _pad(q_wngqd.transpose(1, 2).flatten(2, 3), work.positions.shape[1], _padded(dim, GRAIN))


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step


def _pad(x: Tensor, rows: int | None, columns: int) -> Tensor:
    """With zeros up to these sizes of the last two dimensions; without `rows`, of the last alone."""
    missing = (columns - x.shape[-1], 0 if rows is None else rows - x.shape[-2])
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x
