"""Rows over their largest magnitude, cast to float8, in one launch. The reference is in `models.quantized`.

The same bits as the reference: quotients are rounded correctly, and on the device the cast rounds to the nearest,
ties to even. Triton's interpreter does not, so there the quotients are tested in float32. A row's result does not
depend on the others. Safe to capture in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
LEAST = 2.0**-100
"""As the reference's."""
LEAST_TILE = 1024
"""Elements of a program: narrower rows share one."""


def quantize_rows(x: Tensor, values: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(values (M, K), scales (M, 1) float32), new or written in place: x is about values · scales.

    x is (M, K), its rows contiguous. Values that are given may be float32: then they are not rounded.
    """
    count, width = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"rows must be contiguous, got strides {x.stride()} of shape {tuple(x.shape)}")
    if values is None:
        values = torch.empty((count, width), dtype=FLOAT8, device=x.device)
    if scales is None:
        scales = torch.empty((count, 1), dtype=torch.float32, device=x.device)
    if not (values.is_contiguous() and scales.is_contiguous() and values.shape == x.shape):
        raise ValueError(f"values and scales must be contiguous, values of shape {tuple(x.shape)}")
    block = launch.power_of_two(width)
    rows = max(LEAST_TILE // block, 1)
    _quantize[(launch.blocks(count, rows),)](
        x,
        values,
        scales,
        count,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        LARGEST=LARGEST,
        LEAST=LEAST,
        EARLY=launch.early(),
        launch_pdl=launch.early(),
        num_warps=min(max(rows * block // 512, 4), 16),
    )
    return values, scales


# The number of rows is not specialised on: a batch of one or of sixteen would be another program.
@triton.jit(do_not_specialize=["count"])
def _quantize(
    x, values, scales, count, x_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    launch.wait(EARLY)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    real = (rows < count)[:, None] & (columns < WIDTH)
    value = tl.load(x + rows[:, None] * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(value), axis=1), LEAST)
    whole = tl.full((ROWS,), LARGEST, tl.float32)
    tl.store(scales + rows, tl.div_rn(largest, whole), mask=rows < count)
    scaled = value * tl.div_rn(whole, largest)[:, None]
    tl.store(values + rows[:, None] * WIDTH + columns, scaled.to(values.dtype.element_ty), mask=real)
