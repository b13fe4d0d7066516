"""Attention of single queries over pages of bfloat16 on Hopper: what a decode step spends most of its time on.

Items, merges and the reference are those of `kernels.attention`; `hopper_decode.cu` says how it works. Inference
only; safe to capture in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from headrace.kernels import cuda, launch
from headrace.kernels.attention import Cache

KEYS = 64
"""Of a tile: items are split at multiples of it, and pages hold a multiple of it."""
BOX = 64
"""Columns of a line: 128 bytes. Longer rows are fetched as several lines, so that a tile is one run of memory."""
MOST_QUERIES = 8
"""Query heads of a key head."""
FEW = 8
"""Keys that are fetched at a time at a sequence's end."""
STAGES = {64: 6, 128: 3}
"""Tiles of keys and values in a block's shared memory, by the size of a head."""
BLOCKS, WARPS = 2, 3
"""Of a multiprocessor, and of a block."""


class Maps(ctypes.Structure):
    _fields_ = tuple((name, cuda.TensorMap) for name in ("keys", "values", "few_keys", "few_values"))


def serves(q_thd: Tensor, cache: Cache) -> bool:
    if not (q_thd.is_cuda and q_thd.dtype == cache.keys.dtype == torch.bfloat16 and cuda.available()):
        return False
    if torch.cuda.get_device_capability(q_thd.device)[0] != 9:
        return False
    (_, heads, dim), groups = q_thd.shape, cache.keys.shape[0]
    whole = cache.page > 0 and cache.page % KEYS == 0 and cache.row == dim
    if not (whole and dim in STAGES and heads // groups <= MOST_QUERIES):
        return False
    with torch.cuda.device(q_thd.device):
        return _kernel(dim, heads // groups, groups, cache.page, torch.cuda.current_device()) is not None


def attend_single(
    q_thd: Tensor,
    cache: Cache,
    table: Tensor,
    items: Tensor,
    merges: Tensor,
    out_thd: Tensor,
    counters: Tensor,
    partial: Tensor | None = None,
    statistics: Tensor | None = None,
) -> None:
    """As `attention.attend` and then `merge`, for items of one query each. For what `serves` accepts.

    The kernel launched just before this one must not write table or items, and must wait before it lets this one
    begin (`launch.wait`), so that all before it has ended. Items of no queries come last. `counters`: as many as
    `counters_for` says, zeros, that no other launch uses at the same time; they are zeros again afterwards.
    `partial` and `statistics` are given where an item has a part.
    """
    _, heads, dim = q_thd.shape
    groups = cache.keys.shape[0]
    pieces = groups * len(items)
    if not pieces:
        return
    lines = cache.keys.view(-1, BOX), cache.values.view(-1, BOX)
    arguments = (
        Maps(*(cuda.tensor_map(one, keys * dim // BOX, BOX) for keys in (KEYS, FEW) for one in lines)),
        *(c_void_p(one.data_ptr()) for one in (q_thd, table, items, merges, out_thd)),
        *(c_void_p((out_thd if one is None else one).data_ptr()) for one in (partial, statistics)),
        c_void_p(counters.data_ptr()),
        c_int(pieces),
        *(c_int(number) for number in (q_thd.stride(0), out_thd.stride(0), cache.head // dim, table.stride(0))),
        c_float(math.log2(math.e) / math.sqrt(dim)),
    )
    with torch.cuda.device(q_thd.device):
        device = torch.cuda.current_device()
        kernel = _kernel(dim, heads // groups, groups, cache.page, device)
        assert kernel is not None
        kernel.launch((min(pieces, _blocks(device)), 1, 1), 32 * WARPS, arguments, early=launch.early())


def counters_for(merges: int, groups: int) -> int:
    """int32 numbers of `attend_single`: whose turn it is, who has ended, and what parts have come of each merge."""
    return 2 + merges * groups


@functools.cache
def _kernel(dim: int, queries: int, groups: int, page: int, device: int) -> cuda.Kernel | None:
    """Of the current device, whose number `device` is. None, with a warning, where it cannot be made."""
    numbers = constants(dim, queries, groups, page)
    shared_bytes = STAGES[dim] * 2 * KEYS * dim * 2 + 1024
    try:
        return cuda.Kernel(cuda.source_of("hopper_decode.cu"), "attend_single", numbers, shared_bytes)
    except (RuntimeError, OSError) as error:
        warnings.warn(f"attention goes Triton's way: {error}", RuntimeWarning, stacklevel=2)
        return None


@functools.cache
def _blocks(device: int) -> int:
    return BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count


def constants(dim: int, queries: int, groups: int, page: int) -> dict[str, int]:
    return {"D": dim, "Q": queries, "GROUPS": groups, "PAGE": page, "STAGES": STAGES[dim]}
