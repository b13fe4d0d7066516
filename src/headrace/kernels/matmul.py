"""x @ weightᵀ (+ bias) whose rows do not depend on one another, bit for bit. The reference is `F.linear`.

Every element is one float32 sum over K, in order, K never split, rounded once after the bias was added. Seen on an
H200: in half precision its bits do not depend on the tile, on the number of rows, nor on how the operands are
fetched, so the tile is chosen for speed alone. Float32 has one tile. Forward only; safe to capture in a CUDA graph.

Shape letters: M rows, N columns (out features), K in features.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels import launch

GROUP = 8
"""Tiles of rows that share a tile of the weight while it is in the cache."""


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


FLOAT32 = Tile(64, 64, 32, 4, 3)
WIDE = 16384
"""Columns from which there are enough tiles to fill the device without small ones."""


def tile(rows: int, columns: int) -> Tile:
    """The fastest of those measured, with the shapes of an 8B model on an H200, for half precision."""
    wide = columns >= WIDE
    if rows <= 64:
        return Tile(64, 128, 64, 4, 4) if wide else Tile(64, 32, 128, 4, 4)
    if rows <= 512:
        return Tile(128, 64, 64, 4, 4) if wide else Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3)


def linear(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
    """(M, N), new and contiguous, in x's dtype, which the weight shares. Rows of either may lie apart."""
    x_mk, weight_nk = _rows_contiguous(x_mk), _rows_contiguous(weight_nk)
    rows, depth = x_mk.shape
    columns = weight_nk.shape[0]
    out_mn = torch.empty((rows, columns), dtype=x_mk.dtype, device=x_mk.device)
    if not out_mn.numel():
        return out_mn
    size = tile(rows, columns) if x_mk.dtype.itemsize == 2 else FLOAT32
    described = depth > 0 and _describable(x_mk) and _describable(weight_nk)
    _linear[(launch.blocks(rows, size.rows) * launch.blocks(columns, size.columns),)](
        TensorDescriptor.from_tensor(x_mk, [size.rows, size.depth]) if described else x_mk,
        TensorDescriptor.from_tensor(weight_nk, [size.columns, size.depth]) if described else weight_nk,
        bias_n, out_mn, rows, columns, depth, x_mk.stride(0), weight_nk.stride(0),
        BM=size.rows, BN=size.columns, BK=size.depth, GROUP=GROUP, DESCRIBED=described,
        num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    return out_mn


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _describable(x: Tensor) -> bool:
    """Whether Hopper's tensor memory accelerator can fetch its tiles."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return x.dtype.itemsize == 2 and x.data_ptr() % 16 == 0 and x.stride(0) * x.dtype.itemsize % 16 == 0


# The number of rows is not specialised on: a batch of one or of sixteen would be another program.
@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, columns, depth, x_stride, weight_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    program, tiles_n = tl.program_id(0), tl.cdiv(columns, BN)
    first_tile = program // (GROUP * tiles_n) * GROUP
    together = tl.minimum(tl.cdiv(rows, BM) - first_tile, GROUP)
    first_m = (first_tile + program % (GROUP * tiles_n) % together) * BM
    first_n = program % (GROUP * tiles_n) // together * BN
    m, n, k = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN), tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for first_k in range(0, depth, BK):
        if DESCRIBED:
            a = x.load([first_m, first_k])
            b = weight.load([first_n, first_k])
        else:
            inside = (first_k + k < depth)[None, :]
            x_at = x + m[:, None].to(tl.int64) * x_stride + (first_k + k)[None, :]
            weight_at = weight + n[:, None].to(tl.int64) * weight_stride + (first_k + k)[None, :]
            a = tl.load(x_at, (m < rows)[:, None] & inside, 0.0)
            b = tl.load(weight_at, (n < columns)[:, None] & inside, 0.0)
        sums = tl.dot(a, b.T, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, n < columns, 0.0).to(tl.float32)[None, :]
    at = out + m[:, None].to(tl.int64) * columns + n[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), (m < rows)[:, None] & (n < columns)[None, :])
