"""Everything between the q, k, v projections and attention, in one launch.

    q ─▶ (norm) ─▶ rotate ─▶ q_out          one program: one token, a block of heads of q, of k or of v
    k ─▶ (norm) ─▶ rotate ─▶ cache of keys
    v ─────────────────────▶ cache of values

The reference is `models.ops.ReferenceOps`; this rounds where it does: the norm as in `kernels.norm`, x·cos to the
dtype, then that plus (x's halves swapped)·sin, multiplied and added in float32 and rounded once. A token's result
does not depend on the others. Backward, without a cache, is `kernels.gradients`; safe to capture in a CUDA graph.

Shape letters: T tokens, H query heads, G key/value heads, D head size, N pages, S tokens of a page.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

Turn = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]
"""(cos, sin, q's norm weight, k's norm weight, the norms' eps), as in `models.ops.Rotation`.

cos and sin are (T, 1, D), contiguous, sin's first half negated. Weights are (D,), both or neither given.
"""

TILE = 1024
"""Elements of a program, unless a single head has more."""


def rotate_and_write(
    q_thd: Tensor,
    k_tgd: Tensor,
    v_tgd: Tensor,
    rotation: Turn,
    keys_gnsd: Tensor,
    values_gnsd: Tensor,
    rows_t: Tensor,
) -> Tensor:
    """A new contiguous (T, H, D) of normed and rotated queries; keys and values go to one layer's cache.

    Token t's key of head g is written to `keys_gnsd[g].view(N * S, D)[rows_t[t]]`, cast to the cache's dtype, its
    value likewise. A negative row writes nothing. Rows that are not negative must be distinct.
    """
    if not (keys_gnsd.is_contiguous() and values_gnsd.is_contiguous() and keys_gnsd.shape == values_gnsd.shape):
        raise ValueError(
            "keys and values must be contiguous and of one shape, got "
            f"{tuple(keys_gnsd.shape)} and {tuple(values_gnsd.shape)}"
        )
    q_out = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
    row_stride, head_stride = keys_gnsd.shape[-1], keys_gnsd.stride(0)
    _launch(q_thd, k_tgd, v_tgd, rotation, q_out, keys_gnsd, values_gnsd, rows_t, row_stride, head_stride)
    return q_out


def rotate(q_thd: Tensor, k_tgd: Tensor, rotation: Turn) -> tuple[Tensor, Tensor]:
    """(queries, keys), normed and rotated, new and contiguous."""
    q_out = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
    k_out = torch.empty(k_tgd.shape, dtype=k_tgd.dtype, device=k_tgd.device)
    _launch(q_thd, k_tgd, None, rotation, q_out, k_out, None, None, k_out.stride(0), k_out.stride(1))
    return q_out, k_out


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    rotation: Turn,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor | None,
    rows: Tensor | None,
    row_stride: int,
    head_stride: int,
) -> None:
    cos, sin, q_norm, k_norm, eps = rotation
    tokens, heads, dim = q.shape
    groups = k.shape[1]
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("cos and sin must be contiguous")
    half = launch.power_of_two(dim // 2)
    block = max(TILE // (2 * half), 1)
    q_blocks, k_blocks = launch.blocks(heads, block), launch.blocks(groups, block)
    _rotate[(tokens, q_blocks + k_blocks * (1 if v is None else 2))](
        _heads_together(q),
        _heads_together(k),
        None if v is None else _heads_together(v),
        cos,
        sin,
        q_norm,
        k_norm,
        q_out,
        keys,
        values,
        rows,
        q.stride(0),
        k.stride(0),
        0 if v is None else v.stride(0),
        row_stride,
        head_stride,
        eps,
        H=heads,
        G=groups,
        D=dim,
        BLOCK=block,
        HALF=half,
        NORM=q_norm is not None,
        PAGED=rows is not None,
        EARLY=launch.early(),
        launch_pdl=launch.early(),
        num_warps=min(max(2 * half * block // 512, 1), 4),
    )


def _heads_together(x: Tensor) -> Tensor:
    if x.stride(2) != 1 or (x.shape[1] > 1 and x.stride(1) != x.shape[2]):
        raise ValueError(f"a token's heads must lie together, got strides {x.stride()} of shape {tuple(x.shape)}")
    return x


@triton.jit
def _rotate(
    q, k, v, cos, sin, q_norm, k_norm, q_out, keys, values, rows,
    q_stride, k_stride, v_stride, row_stride, head_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, PAGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch.wait(EARLY)
    Q_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    K_BLOCKS: tl.constexpr = (G + BLOCK - 1) // BLOCK
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1)
    heads = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    if place < Q_BLOCKS:
        heads += place * BLOCK
        real = (heads < H) & (columns < D // 2)
        source = q + token * q_stride + heads * D + columns
        first, second = _turned(source, real, cos + token * D + columns, sin + token * D + columns,
                                q_norm, columns, eps, D, NORM)  # fmt: skip
        _store(q_out + token * (H * D) + heads * D + columns, first, second, real, D)
    else:
        row = token
        if PAGED:
            row = tl.load(rows + token).to(tl.int64)
        if place < Q_BLOCKS + K_BLOCKS:
            heads += (place - Q_BLOCKS) * BLOCK
            real = (heads < G) & (columns < D // 2)
            source = k + token * k_stride + heads * D + columns
            first, second = _turned(source, real, cos + token * D + columns, sin + token * D + columns,
                                    k_norm, columns, eps, D, NORM)  # fmt: skip
            target = row * row_stride + heads.to(tl.int64) * head_stride + columns
            _store(keys + target, first, second, real & (row >= 0), D)
        elif PAGED:
            heads += (place - Q_BLOCKS - K_BLOCKS) * BLOCK
            real = (heads < G) & (columns < D // 2)
            source = v + token * v_stride + heads * D + columns
            first, second = tl.load(source, mask=real), tl.load(source + D // 2, mask=real)
            target = row * row_stride + heads.to(tl.int64) * head_stride + columns
            _store(values + target, first, second, real & (row >= 0), D)


@triton.jit
def _turned(source, real, cos, sin, norm, columns, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Both halves of a block of heads, normed and rotated, in their own dtype."""
    dtype: tl.constexpr = source.dtype.element_ty
    first, second = _halves(source, real, D)
    first_cos, second_cos = _halves(cos, real, D)
    first_sin, second_sin = _halves(sin, real, D)
    if NORM:
        first_weight, second_weight = _halves(norm + columns, real, D)
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / D + eps)[:, None]
        first = _rounded(_rounded(first * scale, dtype) * first_weight, dtype)
        second = _rounded(_rounded(second * scale, dtype) * second_weight, dtype)
    turned_first = tl.fma(second, first_sin, _rounded(first * first_cos, dtype))
    turned_second = tl.fma(first, second_sin, _rounded(second * second_cos, dtype))
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit
def _halves(source, real, D: tl.constexpr):
    # One row for all heads is read once for each: a broadcast after the load would go through shared memory.
    source = tl.broadcast_to(source, real.shape)
    first = tl.load(source, mask=real, other=0.0).to(tl.float32)
    return first, tl.load(source + D // 2, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _store(target, first, second, real, D: tl.constexpr):
    tl.store(target, first.to(target.dtype.element_ty), mask=real)
    tl.store(target + D // 2, second.to(target.dtype.element_ty), mask=real)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)
