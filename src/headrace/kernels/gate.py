"""silu(gate) · up in one pass over memory. The reference is `models.ops.ReferenceOps`.

Rounds where the reference rounds: silu(gate) to the tensors' dtype, then the product. The exponential and the
quotient are the fast ones, within a few units of float32's last place. Backward is `kernels.gradients`; safe to
capture in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch
from headrace.kernels.norm import as_rows

BLOCK = 1024
"""Columns of a program. With four warps each thread reads 16 bytes of bfloat16 from either side."""


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """A new contiguous tensor in gate's shape. The two may be column views of one tensor."""
    gate_rows, up_rows = as_rows(gate), as_rows(up)
    count, width = gate_rows.shape
    out = torch.empty((count, width), dtype=gate.dtype, device=gate.device)
    grid = (count, launch.blocks(width, BLOCK))
    strides = gate_rows.stride(0), up_rows.stride(0)
    options = {"EARLY": launch.early(), "launch_pdl": launch.early(), "num_warps": 4}
    _gate[grid](gate_rows, up_rows, out, width, *strides, BLOCK=BLOCK, **options)
    return out.view(gate.shape)


@triton.jit
def _gate(gate, up, out, width, gate_stride, up_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    launch.wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    value = tl.load(gate + row * gate_stride + columns, mask=real, other=0.0).to(tl.float32)
    factor = tl.load(up + row * up_stride + columns, mask=real, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (value / (1.0 + tl.exp(-value))).to(dtype).to(tl.float32)
    tl.store(out + row * width + columns, (silu * factor).to(dtype), mask=real)
