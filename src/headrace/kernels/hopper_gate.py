"""silu(x @ gateᵀ) · (x @ upᵀ) in one kernel on Hopper: a step's largest product, whose result never reaches memory.

Its blocks also fetch weights while the kernel before it still ends (`kernels.launch`). The reference is
`models.ops.ReferenceOps`: products, then the gate; rounding is where that rounds. Inference only; safe to capture
in a CUDA graph. Shape letters: M rows, K in features, N out features of both halves.
"""

from __future__ import annotations

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
    """Of both halves: a multiple of 64, at most 256."""
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
"""For 64 rows, 128, and more. They fill shared memory, the last a thread's registers too."""


def tiles(rows: int) -> tuple[Tile, ...]:
    """Worth trying for so many."""
    return next((some for some in TILES if rows <= some[0].rows), TILES[-1])


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
    """(M, N / 2) in bfloat16, of weights that are gate's rows and then up's. For what `serves` accepts.

    The kernel launched just before this one must not write the weights, as they are fetched without waiting for it,
    and must wait before it lets this one begin (`launch.wait`), so that all before it has ended.
    """
    (rows, depth), width = x_mk.shape, len(weight_nk) // 2
    out = torch.empty(rows, width, dtype=x_mk.dtype, device=x_mk.device)
    grid = -(-width // (tile.columns // 2)), -(-rows // tile.rows), 1
    with torch.cuda.device(x_mk.device):
        arguments = (
            cuda.tensor_map(x_mk, tile.rows, DEPTH),
            cuda.tensor_map(weight_nk, tile.columns // 2, DEPTH),
            c_void_p(out.data_ptr()),
            c_int(rows),
            c_int(width),
            c_int(depth),
        )
        kernel = _kernel(tile, torch.cuda.current_device())
        kernel.launch(grid, 128 * (tile.consumers + 1), arguments, early=launch.early())
    return out


@cache
def _kernel(tile: Tile, device: int) -> cuda.Kernel:
    """Of the current device, whose number `device` is."""
    return cuda.Kernel(source(tile), "gated_product", constants(tile), tile.shared_bytes)


def constants(tile: Tile) -> dict[str, int]:
    return {name.upper(): value for name, value in tile._asdict().items()}


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
    return cuda.source_of("hopper_gate.cu").replace("// MULTIPLY\n", multiply)
