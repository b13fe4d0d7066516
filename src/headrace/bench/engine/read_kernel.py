"""A Triton kernel that does nothing but read. Imported only where there is a GPU, or Triton's interpreter."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CONFIGURATIONS = [(4096, 8, 8), (8192, 4, 8), (8192, 16, 8), (16384, 4, 16)]
"""(words of a load, loads of a program, warps)."""


@triton.jit
def _sum_words(words, sums, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    program = tl.program_id(0)
    places = program.to(tl.int64) * (BLOCK * LOADS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for load in tl.static_range(LOADS):
        total += tl.load(words + places + load * BLOCK)
    tl.store(sums + program, tl.sum(total))


def read_all(words: Tensor, block: int, loads: int, warps: int) -> Tensor:
    """Sums of consecutive `block * loads` int32 words; the tensor's length is a multiple of that."""
    programs = words.numel() // (block * loads)
    sums = torch.empty(programs, dtype=torch.int32, device=words.device)
    _sum_words[(programs,)](words, sums, BLOCK=block, LOADS=loads, num_warps=warps)
    return sums
