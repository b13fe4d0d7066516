"""Backward passes of the norm, the rotation and the gate, each in one pass over memory.

Their forwards are `kernels.norm`, `kernels.rotate` and `kernels.gate`; what is needed of them is computed again and
not kept. All is float32 inside. A norm's weight gets its gradient as one partial sum for each program (`parts`, of
float32), which `add_parts` adds up in a fixed order. The reference is autograd over `models.ops.ReferenceOps`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch
from headrace.kernels.norm import as_rows
from headrace.kernels.rotate import Turn

PROGRAMS = 1024
"""Of those that add up a weight's gradient: each takes every so manieth tile of rows."""
TILE = 1024
"""Elements of a program's turn, unless a single row or head has more."""
AHEAD = 8192
"""Bytes of a tensor's part in a turn, up to which those of the next two turns are read meanwhile: shared memory."""
BLOCK = 1024
COLUMNS = 32
"""Of partial sums that a program adds up."""


def norm_gradient(
    x: Tensor, weight: Tensor, eps: float, grad_normed: Tensor, grad_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of x, parts of the weight's), of `norm.rms_norm`; `grad_x` is what x has besides."""
    count, width = x.shape
    out = torch.empty_like(x)
    block = launch.power_of_two(width)
    rows = max(TILE // block, 1)
    tiles = launch.blocks(count, rows)
    programs = min(tiles, PROGRAMS)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_gradient[(programs,)](
        x, weight, grad_normed, grad_x, out, parts, tiles, count, eps,
        WIDTH=width, BLOCK=block, ROWS=rows, STAGES=3 if rows * block * x.itemsize <= AHEAD else 1,
        MORE=grad_x is not None, num_warps=min(max(rows * block // 512, 4), 16),
    )  # fmt: skip
    return out, parts


@triton.jit(do_not_specialize=["tiles", "count"])
def _norm_gradient(
    x, weight, grad_normed, grad_x, out, parts, tiles, count, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    known = columns < WIDTH
    factor = tl.load(weight + columns, mask=known, other=0.0).to(tl.float32)
    # Added up over rows at the end alone: within the loop warps would wait for each other.
    part = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        real = (rows < count) & known
        place = rows * WIDTH + columns
        value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed + place, mask=real, other=0.0).to(tl.float32)
        # Read before the reduction, whose barrier no load passes.
        if MORE:
            more = tl.load(grad_x + place, mask=real, other=0.0)
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
        normed = value * scale
        part += grad * normed
        grad *= factor
        found = scale * (grad - normed * (tl.sum(grad * normed, axis=1) / WIDTH)[:, None])
        if MORE:
            found += more.to(tl.float32)
        tl.store(out + place, found.to(out.dtype.element_ty), mask=real)
    place = program.to(tl.int64) * WIDTH + columns
    tl.store(parts + place, tl.sum(part, axis=0)[None, :], mask=known)


def rotate_gradient(
    q_thd: Tensor, k_tgd: Tensor, rotation: Turn, grads: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Parts of the norms' weights' gradients, if there are norms, of `rotate.rotate`; those of q and k go to `out`.

    A token's heads lie together, in q, k and `out`; `grads` are contiguous.
    """
    cos, sin, q_norm, k_norm, eps = rotation
    tokens, heads, dim = q_thd.shape
    groups = k_tgd.shape[1]
    half = launch.power_of_two(dim // 2)
    rows = max(TILE // (2 * half), 1)
    q_blocks, k_blocks = launch.blocks(tokens * heads, rows), launch.blocks(tokens * groups, rows)
    # A program of queries has about as many blocks as one of keys.
    share = PROGRAMS * heads // (heads + groups)
    q_programs, k_programs = min(q_blocks, share), min(k_blocks, PROGRAMS - share)
    parts = torch.empty(q_programs + k_programs, dim, dtype=torch.float32, device=q_thd.device)
    _rotate_gradient[(q_programs + k_programs,)](
        q_thd, k_tgd, cos, sin, q_norm, k_norm, *grads, *out, parts, q_blocks, k_blocks, q_programs, k_programs,
        tokens, q_thd.stride(0), k_tgd.stride(0), out[0].stride(0), out[1].stride(0), eps,
        H=heads, G=groups, D=dim, HALF=half, ROWS=rows, NORM=q_norm is not None, num_warps=4,
    )  # fmt: skip
    return (None, None) if q_norm is None else (parts[:q_programs], parts[q_programs:])


@triton.jit(do_not_specialize=["q_blocks", "k_blocks", "q_programs", "k_programs", "tokens"])
def _rotate_gradient(
    q, k, cos, sin, q_norm, k_norm, grad_q, grad_k, q_out, k_out, parts, q_blocks, k_blocks, q_programs, k_programs,
    tokens, q_stride, k_stride, q_out_stride, k_out_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    part = parts + program.to(tl.int64) * D
    if program < q_programs:
        _turn_back(q, cos, sin, q_norm, grad_q, q_out, part, program, q_blocks, q_programs, tokens, q_stride,
                   q_out_stride, eps, H, D, HALF, ROWS, NORM)  # fmt: skip
    else:
        _turn_back(k, cos, sin, k_norm, grad_k, k_out, part, program - q_programs, k_blocks, k_programs, tokens,
                   k_stride, k_out_stride, eps, G, D, HALF, ROWS, NORM)  # fmt: skip


@triton.jit
def _turn_back(
    x, cos, sin, weight, grad, out, part, first_block, blocks, step, tokens, x_stride, out_stride, eps,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, HALF)[None, :]
    # Added up over rows at the end alone: within the loop warps would wait for each other.
    part_first = tl.zeros((ROWS, HALF), tl.float32)
    part_second = tl.zeros((ROWS, HALF), tl.float32)
    for block in range(first_block, blocks, step):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        real = (rows < tokens * H) & (columns < D // 2)
        token, head = rows // H, rows % H
        given = grad + rows * D + columns
        grad_first = tl.load(given, mask=real, other=0.0).to(tl.float32)
        grad_second = tl.load(given + D // 2, mask=real, other=0.0).to(tl.float32)
        turn = token * D + columns
        first = grad_first * tl.load(cos + turn, mask=real, other=0.0).to(tl.float32)
        first += grad_second * tl.load(sin + turn + D // 2, mask=real, other=0.0).to(tl.float32)
        second = grad_second * tl.load(cos + turn + D // 2, mask=real, other=0.0).to(tl.float32)
        second += grad_first * tl.load(sin + turn, mask=real, other=0.0).to(tl.float32)
        if NORM:
            source = x + token * x_stride + head * D + columns
            value_first = tl.load(source, mask=real, other=0.0).to(tl.float32)
            value_second = tl.load(source + D // 2, mask=real, other=0.0).to(tl.float32)
            squares = value_first * value_first + value_second * value_second
            scale = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
            value_first *= scale
            value_second *= scale
            part_first += first * value_first
            part_second += second * value_second
            known = columns < D // 2
            first *= tl.load(weight + columns, mask=known, other=0.0).to(tl.float32)
            second *= tl.load(weight + columns + D // 2, mask=known, other=0.0).to(tl.float32)
            mean = (tl.sum(first * value_first + second * value_second, axis=1) / D)[:, None]
            first = scale * (first - value_first * mean)
            second = scale * (second - value_second * mean)
        target = out + token * out_stride + head * D + columns
        tl.store(target, first.to(out.dtype.element_ty), mask=real)
        tl.store(target + D // 2, second.to(out.dtype.element_ty), mask=real)
    if NORM:
        place = part + columns
        tl.store(place, tl.sum(part_first, axis=0)[None, :], mask=columns < D // 2)
        tl.store(place + D // 2, tl.sum(part_second, axis=0)[None, :], mask=columns < D // 2)


def add_parts(parts: Tensor, total: Tensor) -> None:
    """Add the sum of the rows to `total`; float32, contiguous."""
    count, width = parts.shape
    _add_parts[(launch.blocks(width, COLUMNS),)](parts, total, count, width, ROWS=256, COLUMNS=COLUMNS, num_warps=8)


@triton.jit(do_not_specialize=["count"])
def _add_parts(parts, total, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < width
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, count, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        found += tl.load(parts + rows * width + columns[None, :], mask=(rows < count) & real[None, :], other=0.0)
    before = tl.load(total + columns, mask=real, other=0.0)
    tl.store(total + columns, before + tl.sum(found, axis=0), mask=real)


def gate_gradient(gate: Tensor, up: Tensor, grad: Tensor, out: tuple[Tensor, ...]) -> None:
    """Those of gate and up, of `gate.gated_silu`, to `out`: two matrices, which may be columns of one."""
    rows = as_rows(gate), as_rows(up), as_rows(grad), *out
    count, width = rows[0].shape
    strides = (one.stride(0) for one in rows)
    _gate_gradient[(count, launch.blocks(width, BLOCK))](*rows, width, *strides, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _gate_gradient(
    gate, up, grad, grad_gate, grad_up, width,
    gate_stride, up_stride, grad_stride, grad_gate_stride, grad_up_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    value = tl.load(gate + row * gate_stride + columns, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + columns, mask=real, other=0.0).to(tl.float32)
    given = tl.load(grad + row * grad_stride + columns, mask=real, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-value))
    dtype = grad_gate.dtype.element_ty
    tl.store(grad_up + row * grad_up_stride + columns, (given * value * share).to(dtype), mask=real)
    slope = share * (1.0 + value * (1.0 - share))
    tl.store(grad_gate + row * grad_gate_stride + columns, (given * factor * slope).to(dtype), mask=real)
