"""Of the columns that all adapters have between their A and B, keep a token's own, times its scale.

The reference is `models.adapted.AdaptedOps`: a product in float32, rounded once. Safe to capture in a CUDA graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

BLOCK = 1024
"""Columns of a program."""


def keep_own(columns: Tensor, numbers: Tensor, scales: Tensor, rank: int) -> Tensor:
    """`columns` itself, changed: (T, K·N·rank), contiguous; blocks of `rank` are adapters 1 … N's, K times over.

    `numbers` (T,) int32 are the tokens' adapters, 0 for none; `scales` (N + 1,) float32 is by adapter. In others'
    columns what is not a number becomes zero too.
    """
    tokens, width = columns.shape
    adapters = len(scales) - 1
    if tokens:
        _keep_own[(tokens, launch.blocks(width, BLOCK))](
            columns, numbers, scales, width, adapters, rank,
            BLOCK=BLOCK, EARLY=launch.early(), launch_pdl=launch.early(), num_warps=4,
        )  # fmt: skip
    return columns


@triton.jit
def _keep_own(columns, numbers, scales, width, adapters, rank, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    launch.wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(numbers + row)
    own = (column // rank) % adapters + 1 == number
    at = columns + row * width + column
    # Only these are read: the others' need not be numbers.
    value = tl.load(at, mask=(column < width) & own, other=0.0).to(tl.float32)
    scaled = value * tl.load(scales + number)
    tl.store(at, tl.where(own, scaled, 0.0).to(columns.dtype.element_ty), mask=column < width)
