"""x @ weightᵀ on Hopper in one kernel: with a gate inside, so that a step's largest product never reaches memory, or
in parts of K that the norm after it sums.

Its blocks fetch weights while the kernel before it still ends (`kernels.launch`), which the library's do not. The
reference is `models.ops.ReferenceOps`: products, then the gate; rounding is where that rounds. Inference only; safe
to capture in a CUDA graph. Shape letters: M rows, K in features, N out features, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import cuda, launch

DEPTH = 64
"""Of a fetched tile: 128 bytes of each row."""
ALIGN = 8
"""Numbers that K, N and strides are multiples of: 16 bytes."""


class Tile(NamedTuple):
    """What a block computes."""

    consumers: int
    """Warp groups that multiply."""
    subtiles: int
    """64 rows each, of a warp group."""
    columns: int
    """A multiple of 32, at most 256; of both halves if gated, and then of 64."""
    stages: int

    @property
    def rows(self) -> int:
        return 64 * self.consumers * self.subtiles

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows + self.columns) * DEPTH * 2 + 1024


TILES = (
    (Tile(1, 1, 192, 7), Tile(1, 1, 256, 5)),
    (Tile(2, 1, 192, 5), Tile(2, 1, 256, 4)),
    (Tile(2, 2, 192, 4),),
)
"""For a gate and 64 rows, 128, and more. They fill shared memory, the last a thread's registers too."""
PART_TILES = (
    (Tile(1, 1, 128, 9), Tile(1, 1, 160, 8), Tile(1, 1, 192, 7)),
    (Tile(2, 1, 128, 7), Tile(2, 1, 160, 6), Tile(2, 1, 192, 5)),
    (Tile(2, 2, 128, 4), Tile(2, 2, 160, 4), Tile(2, 2, 192, 4)),
)
"""Likewise, for parts."""
MOST_PARTS = 4
LEAST_BUSY = 0.85
"""Of the device's multiprocessors, by the blocks that parts make."""


def tiles(rows: int, of: tuple[tuple[Tile, ...], ...] = TILES) -> tuple[Tile, ...]:
    """Worth trying for so many."""
    return next((some for some in of if rows <= some[0].rows), of[-1])


def cuts(rows: int, columns: int, processors: int) -> Iterator[tuple[Tile, int]]:
    """(tile, parts) by which a product's blocks are about as many as the device has multiprocessors."""
    for tile in tiles(rows, PART_TILES):
        blocks = -(-columns // tile.columns) * -(-rows // tile.rows)
        parts = processors // blocks
        if 1 < parts <= MOST_PARTS and parts * blocks >= LEAST_BUSY * processors:
            yield tile, parts


def serves(x_mk: Tensor, weight_nk: Tensor) -> bool:
    if not (x_mk.is_cuda and x_mk.dtype == weight_nk.dtype == torch.bfloat16 and x_mk.dim() == 2):
        return False
    if torch.cuda.get_device_capability(x_mk.device)[0] != 9 or not cuda.available():
        return False
    sizes = x_mk.shape[1], len(weight_nk) // 2, x_mk.stride(0), weight_nk.stride(0)
    dense = x_mk.stride(1) == weight_nk.stride(1) == 1 and len(weight_nk) % 2 == 0
    aligned = (x_mk.data_ptr() | weight_nk.data_ptr()) % 16 == 0 and all(size % ALIGN == 0 for size in sizes)
    return dense and aligned and len(x_mk) > 0


def gated_product(x_mk: Tensor, weight_nk: Tensor, tile: Tile) -> Tensor:
    """silu(x @ gateᵀ) · (x @ upᵀ), (M, N / 2) in bfloat16, of weights that are gate's rows and then up's.

    For what `serves` accepts. The kernel launched just before this one must not write the weights, as they are
    fetched without waiting for it, and must wait before it lets this one begin (`launch.wait`), so that all before
    it has ended.
    """
    out = x_mk.new_empty(len(x_mk), len(weight_nk) // 2)
    _launch(x_mk, weight_nk, out, tile, gated=True)
    return out


def product(x_mk: Tensor, weight_nk: Tensor, tile: Tile, parts: int = 1) -> Tensor:
    """(M, N) in bfloat16; of several parts (P, M, N) in float32, whose sum over P it is. Otherwise as above."""
    sizes = len(x_mk), len(weight_nk)
    out = x_mk.new_empty(sizes) if parts == 1 else x_mk.new_empty(parts, *sizes, dtype=torch.float32)
    _launch(x_mk, weight_nk, out, tile, parts=parts)
    return out


def _launch(
    x_mk: Tensor, weight_nk: Tensor, out: Tensor, tile: Tile, *, parts: int = 1, gated: bool = False
) -> None:
    (rows, depth), width = x_mk.shape, out.shape[-1]
    grid = -(-width // (tile.columns // (1 + gated))), -(-rows // tile.rows), parts
    with torch.cuda.device(x_mk.device):
        arguments = (
            cuda.tensor_map(x_mk, tile.rows, DEPTH),
            cuda.tensor_map(weight_nk, tile.columns // 2, DEPTH),
            c_void_p(out.data_ptr()),
            c_int(rows),
            c_int(width),
            c_int(depth),
        )
        kernel = _kernel(tile, gated, out.dtype == torch.float32, torch.cuda.current_device())
        kernel.launch(grid, 128 * (tile.consumers + 1), arguments, early=launch.early())


@cache
def _kernel(tile: Tile, gated: bool, in_parts: bool, device: int) -> cuda.Kernel:
    """Of the current device, whose number `device` is."""
    return cuda.Kernel(source(tile), "product", constants(tile, gated, in_parts), tile.shared_bytes)


def constants(tile: Tile, gated: bool, in_parts: bool) -> dict[str, int]:
    sizes = {name.upper(): value for name, value in tile._asdict().items()}
    return {**sizes, "GATED": int(gated), "IN_PARTS": int(in_parts)}


def source(tile: Tile) -> str:
    """With the instruction that names each of a thread's sums."""
    count = tile.columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    multiply = (
        "__device__ __forceinline__ void multiply(float (&sums)[SUMS], u64 x, u64 weight) {\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{tile.columns}k16.f32.bf16.bf16 {{{sums}}}, '
        f'%{count}, %{count + 1}, 1, 1, 1, 0, 0;" : {operands} : "l"(x), "l"(weight));\n}}\n'
    )
    return cuda.source_of("hopper_product.cu").replace("// MULTIPLY\n", multiply)
