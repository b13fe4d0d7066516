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

from headrace.kernels.norm import as_rows

PROGRAMS = 1024
"""Of those that add up a weight's gradient: each takes every so manieth row."""
TILE = 1024
BLOCK = 1024
COLUMNS = 32
"""Of partial sums that a program adds up."""


def norm_gradient(
    x: Tensor, weight: Tensor, eps: float, grad_normed: Tensor, grad_x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of x, parts of the weight's), of `norm.rms_norm`; `grad_x` is what x has besides."""
    count, width = x.shape
    out = torch.empty_like(x)
    programs = min(count, PROGRAMS)
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _norm_gradient[(programs,)](
        x, weight, grad_normed, grad_x, out, parts, count, eps,
        WIDTH=width, BLOCK=block, PROGRAMS=programs, MORE=grad_x is not None,
        num_warps=min(max(block // 512, 4), 16),
    )  # fmt: skip
    return out, parts


@triton.jit(do_not_specialize=["count"])
def _norm_gradient(
    x, weight, grad_normed, grad_x, out, parts, count, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    real = columns < WIDTH
    factor = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, count, PROGRAMS):
        place = tl.cast(row, tl.int64) * WIDTH + columns
        value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed + place, mask=real, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        normed = value * scale
        part += grad * normed
        grad *= factor
        found = scale * (grad - normed * (tl.sum(grad * normed, axis=0) / WIDTH))
        if MORE:
            found += tl.load(grad_x + place, mask=real, other=0.0).to(tl.float32)
        tl.store(out + place, found.to(out.dtype.element_ty), mask=real)
    tl.store(parts + first.to(tl.int64) * WIDTH + columns, part, mask=real)


def rotate_gradient(
    x_thd: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, grad_thd: Tensor
) -> tuple[Tensor, Tensor | None]:
    """(gradient of x, parts of the norm's weight's if there is one), of `rotate.rotate` for queries or keys."""
    tokens, heads, dim = x_thd.shape
    out = torch.empty(x_thd.shape, dtype=x_thd.dtype, device=x_thd.device)
    half = triton.next_power_of_2(dim // 2)
    rows = max(TILE // (2 * half), 1)
    blocks = triton.cdiv(tokens * heads, rows)
    programs = min(blocks, PROGRAMS)
    parts = torch.empty(programs, dim, dtype=torch.float32, device=x_thd.device)
    _rotate_gradient[(programs,)](
        x_thd, cos, sin, weight, grad_thd, out, parts, blocks, tokens * heads, x_thd.stride(0), eps,
        H=heads, D=dim, HALF=half, ROWS=rows, PROGRAMS=programs, NORM=weight is not None, num_warps=4,
    )  # fmt: skip
    return out, None if weight is None else parts


@triton.jit(do_not_specialize=["blocks", "count"])
def _rotate_gradient(
    x, cos, sin, weight, grad, out, parts, blocks, count, x_stride, eps,
    H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, HALF)[None, :]
    # Added up over rows at the end alone: within the loop warps would wait for each other.
    part_first = tl.zeros((ROWS, HALF), tl.float32)
    part_second = tl.zeros((ROWS, HALF), tl.float32)
    for block in range(program, blocks, PROGRAMS):
        rows = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        real = (rows < count) & (columns < D // 2)
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
        target = out + rows * D + columns
        tl.store(target, first.to(out.dtype.element_ty), mask=real)
        tl.store(target + D // 2, second.to(out.dtype.element_ty), mask=real)
    if NORM:
        place = parts + program.to(tl.int64) * D + columns
        tl.store(place, tl.sum(part_first, axis=0)[None, :], mask=columns < D // 2)
        tl.store(place + D // 2, tl.sum(part_second, axis=0)[None, :], mask=columns < D // 2)


def add_parts(parts: Tensor, total: Tensor) -> None:
    """Add the sum of the rows to `total`; float32, contiguous."""
    count, width = parts.shape
    _add_parts[(triton.cdiv(width, COLUMNS),)](parts, total, count, width, ROWS=256, COLUMNS=COLUMNS, num_warps=8)


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


def gate_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of gate, of up), of `gate.gated_silu`; both contiguous, in gate's shape."""
    gate_rows, up_rows, grad_rows = as_rows(gate), as_rows(up), as_rows(grad)
    count, width = gate_rows.shape
    grad_gate, grad_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    strides = gate_rows.stride(0), up_rows.stride(0), grad_rows.stride(0)
    _gate_gradient[(count, triton.cdiv(width, BLOCK))](
        gate_rows, up_rows, grad_rows, grad_gate, grad_up, width, *strides, BLOCK=BLOCK, num_warps=4
    )
    return grad_gate, grad_up


@triton.jit
def _gate_gradient(
    gate, up, grad, grad_gate, grad_up, width, gate_stride, up_stride, grad_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    value = tl.load(gate + row * gate_stride + columns, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + columns, mask=real, other=0.0).to(tl.float32)
    given = tl.load(grad + row * grad_stride + columns, mask=real, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-value))
    dtype = grad_gate.dtype.element_ty
    tl.store(grad_up + row * width + columns, (given * value * share).to(dtype), mask=real)
    slope = share * (1.0 + value * (1.0 - share))
    tl.store(grad_gate + row * width + columns, (given * factor * slope).to(dtype), mask=real)
