"""Keys and values of sequences that share rows, and the way back, each for both in one launch: what `index_select`
is, and `index_add_`, which on a GPU adds in any order, and one element at a time.

    given (U, G, D) ── rows (K,) ─▶ taken (K, G · R, D)       each head R times, side by side
    summed (U, G, D) ◀── occurrences ── gradients (K, G · R, D)

Shape letters: U rows given, K rows taken, G heads, R repeats of each, D head size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

BLOCK = 1024

Pair = tuple[Tensor, Tensor]


def occurrences(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(starts, places), int32: row r is `rows` at places[starts[r] : starts[r + 1]], in rising order."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows))]) if len(rows) else np.zeros(1)
    return starts.astype(np.int32), np.argsort(rows, kind="stable").astype(np.int32)


def take_rows(given: Pair, rows: Tensor | None, repeats: int = 1) -> Pair:
    """Of both the rows named, or all in order, with each head repeated. A row's heads lie together."""
    first, second = given
    count, (_, heads, dim) = len(first) if rows is None else len(rows), first.shape
    assert first.shape == second.shape
    # A single head's stride is nobody's business, and may be anything.
    together = all(x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim) for x in given)
    assert together, "a row's heads lie together"
    taken = tuple(torch.empty(count, heads * repeats, dim, dtype=x.dtype, device=x.device) for x in given)
    width = heads * repeats * dim
    if count and width:
        _take_rows[(count, launch.blocks(width, BLOCK), 2)](
            first, second, rows, *taken, first.stride(0), second.stride(0),
            WIDTH=width, DIM=dim, REPEATS=repeats, NAMED=rows is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return taken[0], taken[1]


@triton.jit
def _take_rows(
    first, second, rows, first_out, second_out, first_stride, second_stride,
    WIDTH: tl.constexpr, DIM: tl.constexpr, REPEATS: tl.constexpr, NAMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < WIDTH
    source = columns // (DIM * REPEATS) * DIM + columns % DIM
    row = tl.load(rows + place).to(tl.int64) if NAMED else place
    target = place * WIDTH + columns
    if tl.program_id(2) == 0:
        tl.store(first_out + target, tl.load(first + row * first_stride + source, mask=real), mask=real)
    else:
        tl.store(second_out + target, tl.load(second + row * second_stride + source, mask=real), mask=real)


def sum_rows(values: Pair, found: Pair | None, count: int, repeats: int = 1) -> Pair:
    """Back from `take_rows`: `count` rows, each the sum over its `occurrences` in `values` and over heads' repeats,
    in float32 inside and in a fixed order; 0 without any. None: every row is there once, in order. The values are
    contiguous."""
    _, heads, dim = values[0].shape
    heads //= repeats
    assert all(one.is_contiguous() and one.shape == values[0].shape for one in values)
    summed = tuple(torch.empty(count, heads, dim, dtype=x.dtype, device=x.device) for x in values)
    starts, places = (None, None) if found is None else found
    width = heads * dim
    if count and width:
        _sum_rows[(count, launch.blocks(width, BLOCK), 2)](
            *values, starts, places, *summed, count if starts is None else len(starts) - 1,
            WIDTH=width, DIM=dim, REPEATS=repeats, NAMED=starts is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return summed[0], summed[1]


@triton.jit(do_not_specialize=["known"])
def _sum_rows(
    first, second, starts, places, first_out, second_out, known,
    WIDTH: tl.constexpr, DIM: tl.constexpr, REPEATS: tl.constexpr, NAMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(2) == 0:
        _sum_row(first, starts, places, first_out, known, WIDTH, DIM, REPEATS, NAMED, BLOCK)
    else:
        _sum_row(second, starts, places, second_out, known, WIDTH, DIM, REPEATS, NAMED, BLOCK)


@triton.jit
def _sum_row(
    values, starts, places, out, known,
    WIDTH: tl.constexpr, DIM: tl.constexpr, REPEATS: tl.constexpr, NAMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < WIDTH
    source = columns // DIM * (DIM * REPEATS) + columns % DIM
    begin, end = row, row + 1
    if NAMED:
        begin = tl.load(starts + row, mask=row < known, other=0)
        end = tl.load(starts + row + 1, mask=row < known, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(begin, end):
        place = tl.cast(tl.load(places + at) if NAMED else at, tl.int64)
        for repeat in tl.static_range(REPEATS):
            at_columns = values + place * (WIDTH * REPEATS) + repeat * DIM + source
            total += tl.load(at_columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, total.to(out.dtype.element_ty), mask=real)
