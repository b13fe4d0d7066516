"""Sums of rows that are the same row's, in a fixed order: what `index_select` is for gradients. The reference is
`index_add_`, which on a GPU adds in any order, and one element at a time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

BLOCK = 1024


def occurrences(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, places), int32: row r is `rows` at places[starts[r] : starts[r + 1]], in rising order."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))]) if len(rows) else np.zeros(1)
    return starts.astype(np.int32), np.argsort(rows, kind="stable").astype(np.int32)


def sum_rows(values: Tensor, starts: Tensor, places: Tensor, out: Tensor) -> None:
    """Row r of `out` becomes the sum over its `occurrences` in `values`, in float32 inside, or 0 without any.
    Both contiguous, with the same elements in a row."""
    width = out[0].numel() if len(out) else 0
    if width:
        _sum_rows[(len(out), launch.blocks(width, BLOCK))](
            values, starts, places, out, len(starts) - 1, WIDTH=width, BLOCK=BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize=["known"])
def _sum_rows(values, starts, places, out, known, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < WIDTH
    first = tl.load(starts + row, mask=row < known, other=0)
    last = tl.load(starts + row + 1, mask=row < known, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(first, last):
        place = tl.load(places + at).to(tl.int64)
        total += tl.load(values + place * WIDTH + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, total.to(out.dtype.element_ty), mask=real)
