"""Many tensors copied to as many places, each to the dtype of its place, in one launch for each pair of dtypes.
The reference is `Tensor.copy_`, one after another.

Where tensors are small, a launch costs more than its copy: an adapter of an 8B model has 504 of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.digest import ALIGN, plan

PIECE = 64 * 1024
"""Elements of a program."""
AT_ONCE = 4096
"""Elements of a turn of its loop."""
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class Casts:
    """From these tensors to those places, again and again, by tables made once. On the current stream."""

    def __init__(self, tensors: Sequence[Tensor], places: Sequence[Tensor]):
        """All on one CUDA device and contiguous; a place has as many elements as its tensor. See `possible`."""
        pairs: dict[tuple[tl.dtype, tl.dtype], list[tuple[Tensor, Tensor]]] = {}
        for tensor, place in zip(tensors, places, strict=True):
            pairs.setdefault(_kinds(tensor, place), []).append((tensor.detach(), place))
        self._launches = [(*kinds, *_table(ends)) for kinds, ends in pairs.items()]

    @staticmethod
    def possible(tensor: Tensor, place: Tensor) -> bool:
        """Whether the pair can be among them."""
        same = tensor.dtype == place.dtype and tensor.itemsize in _WORDS
        known = same or (tensor.dtype in _FLOATS and place.dtype in _FLOATS)
        together = tensor.device == place.device and tensor.numel() == place.numel()
        return known and together and tensor.is_contiguous() and place.is_contiguous()

    def run(self) -> None:
        with torch.cuda.device_of(self._launches[0][2]):
            for source, target, table, aligned in self._launches:
                if len(table):
                    _cast[(len(table),)](
                        table, FROM=source, TO=target, ALIGNED=aligned, AT_ONCE=AT_ONCE, num_warps=8
                    )


def _kinds(tensor: Tensor, place: Tensor) -> tuple[tl.dtype, tl.dtype]:
    if tensor.dtype == place.dtype:
        word = _WORDS[tensor.itemsize]
        return word, word
    return _FLOATS[tensor.dtype], _FLOATS[place.dtype]


def _table(ends: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, bool]:
    """((pieces, 3), int64: where from, where to, how many elements; whether all begin at multiples of 16 bytes)."""
    addresses = np.array([[end.data_ptr() for end in pair] for pair in ends], np.int64)
    sources, targets = (
        plan(addresses[:, side].tolist(), [pair[side].nbytes for pair in ends], PIECE * ends[0][side].itemsize)
        for side in (0, 1)
    )
    rows = np.stack([sources[:, 0], targets[:, 0], sources[:, 1] // ends[0][0].itemsize], axis=1).astype(np.int64)
    return torch.from_numpy(rows).to(ends[0][0].device), not (addresses % ALIGN).any()


@triton.jit
def _cast(table, FROM: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr, AT_ONCE: tl.constexpr):
    piece = tl.program_id(0)
    source = tl.load(table + 3 * piece).to(tl.pointer_type(FROM))
    target = tl.load(table + 3 * piece + 1).to(tl.pointer_type(TO))
    count = tl.load(table + 3 * piece + 2).to(tl.int32)
    if ALIGNED:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    # Without a mask as far as that goes: with one, elements are read one by one.
    whole = count // AT_ONCE * AT_ONCE
    for first in tl.range(0, whole, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        tl.store(target + at, tl.load(source + at).to(TO))
    at = whole + tl.arange(0, AT_ONCE)
    tl.store(target + at, tl.load(source + at, at < count).to(TO), at < count)
