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
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels import cuda, launch
from headrace.kernels.attention import Cache
from headrace.kernels.rotate import Turn

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


class Projected(NamedTuple):
    """With these, queries too are as their projection left them: it then does what `rotate_and_write` does."""

    k_tgd: Tensor
    v_tgd: Tensor
    rotation: Turn
    rows_t: Tensor
    """int32: where in a head's rows of the cache a token's key and value go; negative: they are there."""

    @property
    def normed(self) -> bool:
        return self.rotation[2] is not None


ALIGN_BYTES = 16
"""Of what is copied for each token."""


class ProjectedArguments(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("k", "v", "cos", "sin", "q_norm", "k_norm", "keys", "values", "rows")),
        *((name, c_int) for name in ("k_stride", "v_stride")),
        ("eps", c_float),
    )


def serves(q_thd: Tensor, cache: Cache, projected: Projected | None = None) -> bool:
    if not (q_thd.is_cuda and q_thd.dtype == cache.keys.dtype == torch.bfloat16 and cuda.available()):
        return False
    if torch.cuda.get_device_capability(q_thd.device)[0] != 9 or not _heads_together(q_thd):
        return False
    if projected is not None and not _fits(projected):
        return False
    (_, heads, dim), groups = q_thd.shape, cache.keys.shape[0]
    whole = cache.page > 0 and cache.page % KEYS == 0 and cache.row == dim
    if not (whole and dim in STAGES and heads // groups <= MOST_QUERIES):
        return False
    with torch.cuda.device(q_thd.device):
        how = _how(projected)
        return _kernel(*_sizes(q_thd, cache), torch.cuda.current_device(), *how) is not None


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
    projected: Projected | None = None,
) -> None:
    """As `attention.attend` and then `merge`, for items of one query each. For what `serves` accepts.

    The kernel launched just before this one must not write table, items, rows or norms, and must wait before it
    lets this one begin (`launch.wait`), so that all before it has ended. Items of no queries come last.
    `counters`: as many as `counters_for` says, zeros, that no other launch uses at the same time; they are zeros
    again afterwards. `partial` and `statistics` are given where an item has a part.
    """
    dim, groups = q_thd.shape[2], cache.keys.shape[0]
    pieces = groups * len(items)
    if not pieces:
        return
    lines = cache.keys.view(-1, BOX), cache.values.view(-1, BOX)
    arguments = (
        Maps(*(cuda.tensor_map(one, keys * dim // BOX, BOX) for keys in (KEYS, FEW) for one in lines)),
        *(c_void_p(one.data_ptr()) for one in (q_thd, table, items, merges, out_thd)),
        *(c_void_p((out_thd if one is None else one).data_ptr()) for one in (partial, statistics)),
        ProjectedArguments() if projected is None else _arguments(projected, cache),
        c_void_p(counters.data_ptr()),
        c_int(pieces),
        *(c_int(number) for number in (q_thd.stride(0), out_thd.stride(0), cache.head // dim, table.stride(0))),
        c_float(math.log2(math.e) / math.sqrt(dim)),
    )
    with torch.cuda.device(q_thd.device):
        device = torch.cuda.current_device()
        kernel = _kernel(*_sizes(q_thd, cache), device, *_how(projected))
        assert kernel is not None
        kernel.launch((min(pieces, _blocks(device)), 1, 1), 32 * WARPS, arguments, early=launch.early())


def _fits(projected: Projected) -> bool:
    cos, sin, *norms, _ = projected.rotation
    whole = cos, sin, *(one for one in norms if one is not None)
    if any(one.dtype != torch.bfloat16 for one in (projected.k_tgd, projected.v_tgd, *whole)):
        return False
    if not (_heads_together(projected.k_tgd) and _heads_together(projected.v_tgd)):
        return False
    rows = projected.rows_t
    aligned = all(one.is_contiguous() and one.data_ptr() % ALIGN_BYTES == 0 for one in whole)
    return aligned and rows.dtype == torch.int32 and rows.is_contiguous()


def _heads_together(by_token: Tensor) -> bool:
    """And each token's begin where they can be copied from."""
    at, apart = by_token.data_ptr(), by_token.stride(0) * by_token.element_size()
    return by_token.stride()[1:] == (by_token.shape[2], 1) and at % ALIGN_BYTES == apart % ALIGN_BYTES == 0


def _how(projected: Projected | None) -> tuple[bool, bool]:
    return (False, False) if projected is None else (True, projected.normed)


def counters_for(merges: int, groups: int) -> int:
    """int32 numbers of `attend_single`: whose turn it is, who has ended, and what parts have come of each merge."""
    return 2 + merges * groups


def _arguments(projected: Projected, cache: Cache) -> ProjectedArguments:
    k, v, (cos, sin, q_norm, k_norm, eps), rows = projected
    tensors = k, v, cos, sin, q_norm, k_norm, cache.keys, cache.values, rows
    pointers = (None if one is None else one.data_ptr() for one in tensors)
    return ProjectedArguments(*pointers, k.stride(0), v.stride(0), eps)


def _sizes(q_thd: Tensor, cache: Cache) -> tuple[int, int, int, int]:
    (_, heads, dim), groups = q_thd.shape, cache.keys.shape[0]
    return dim, heads // groups, groups, cache.page


@functools.cache
def _kernel(
    dim: int, queries: int, groups: int, page: int, device: int, projected: bool = False, norm: bool = False
) -> cuda.Kernel | None:
    """Of the current device, whose number `device` is. None, with a warning, where it cannot be made."""
    numbers = constants(dim, queries, groups, page, projected, norm)
    opening = queries + 4 if projected else queries
    shared_bytes = STAGES[dim] * (2 * KEYS + opening) * dim * 2 + 1024
    try:
        return cuda.Kernel(cuda.source_of("hopper_decode.cu"), "attend_single", numbers, shared_bytes)
    except (RuntimeError, OSError) as error:
        warnings.warn(f"attention goes Triton's way: {error}", RuntimeWarning, stacklevel=2)
        return None


@functools.cache
def _blocks(device: int) -> int:
    return BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count


def constants(
    dim: int, queries: int, groups: int, page: int, projected: bool = False, norm: bool = False
) -> dict[str, int]:
    sizes = {"D": dim, "Q": queries, "GROUPS": groups, "PAGE": page, "STAGES": STAGES[dim]}
    return sizes | {"PROJECTED": int(projected), "NORM": int(norm)}
