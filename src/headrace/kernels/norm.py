"""RMS norm over the last dimension, alone or after adding a residual. The reference is `models.ops.ReferenceOps`.

Rounds where the reference rounds: the sum to the tensors' dtype, its statistics in float32, the scaled value to
the dtype, its product with the weight to the dtype. Only the order of the summation of squares is its own. It
depends on the width and the alignment of rows, so a row's result is the same bit for bit in every batch.
Backward is `kernels.gradients`; safe to capture in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

LEAST_TILE = 1024
"""Elements of a program: narrower rows share one."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root mean square(x) · weight, in x's shape. float32, float16 or bfloat16, the weight likewise."""
    rows = as_rows(x)
    normed = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, normed, None, eps)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual); both inputs have one shape and dtype.

    x may also come in parts: one dimension more, in front, contiguous and in float32. Their sum is rounded to the
    residual's dtype before it is added.
    """
    parts = x.shape[0] if x.dim() > residual.dim() else 1
    rows, residual_rows = as_rows(x), as_rows(residual)
    normed = torch.empty(residual_rows.shape, dtype=residual.dtype, device=x.device)
    total = torch.empty_like(normed)
    _launch(rows, residual_rows, weight, normed, total, eps, parts)
    return normed.view(residual.shape), total.view(residual.shape)


def as_rows(x: Tensor) -> Tensor:
    """(rows, width): a view wherever leading dimensions are evenly spaced and the last is contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    normed: Tensor,
    total: Tensor | None,
    eps: float,
    parts: int = 1,
) -> None:
    count, width = normed.shape
    block = launch.power_of_two(width)
    rows = max(LEAST_TILE // block, 1)
    _norm[(launch.blocks(count, rows),)](
        x,
        residual,
        weight,
        normed,
        total,
        count,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        ADD=residual is not None,
        PARTS=parts,
        EARLY=launch.early(),
        launch_pdl=launch.early(),
        num_warps=min(max(rows * block // 512, 4), 16),
    )


# The number of rows is not specialised on: a batch of one or of sixteen would be another program.
@triton.jit(do_not_specialize=["count"])
def _norm(
    x, residual, weight, normed, total, count, x_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch.wait(EARLY)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    real = (rows < count) & (columns < WIDTH)
    value = tl.load(x + rows * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + (part * count + rows) * x_stride + columns, mask=real, other=0.0)
    if PARTS > 1:
        value = value.to(normed.dtype.element_ty).to(tl.float32)
    # Read before the reduction, whose barrier no load passes.
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + rows * residual_stride + columns, mask=real, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + rows * WIDTH + columns, rounded, mask=real)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    scaled = (value * scale[:, None]).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + rows * WIDTH + columns, (scaled * factor).to(normed.dtype.element_ty), mask=real)
