"""The full payload: a version's image, filled from the first byte to the last.

The bytes are cut into buckets wherever a transport likes; tensors begin and end within them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.sync.base import TensorSpec
from headrace.sync.layout import ALIGN, lay_out

BUCKET_BYTES = 8 << 20
"""So much is filled before receivers hear of it."""

# Torch splits a larger copy among OpenMP threads. A second pool of them, for the thread that publishes, makes
# libgomp sleep at every barrier of the first: training or decoding in the process slows down 2.4 times.
_ONE_THREAD = 32767


def image_of(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None, align: int = ALIGN
) -> tuple[tuple[TensorSpec, ...], int]:
    """Where each tensor goes and the bytes of all. Floating-point tensors become `dtype`, or stay as they are."""
    kinds = {}
    for name, tensor in tensors.items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        shape = tuple(tensor.shape)
        kinds[name] = (str(kind).removeprefix("torch."), shape, tensor.numel() * kind.itemsize)
    return lay_out(kinds, align)


def pack(
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, Tensor],
    image: Tensor,
    advance: Callable[[int], None] = lambda filled: None,
) -> None:
    """Cast and copy each tensor to its place in `image`, bucket after bucket. `advance` hears how many bytes are
    there; on CUDA once they really are, and once only."""
    if image.device.type != "cpu":
        # A launch costs more than what it copies of a small bucket.
        pack_range(specs, tensors, 0, image)
        torch.cuda.current_stream(image.device).synchronize()
        advance(len(image))
        return
    for first in range(0, len(image), BUCKET_BYTES):
        last = min(first + BUCKET_BYTES, len(image))
        pack_range(specs, tensors, first, image[first:last])
        advance(last)


def pack_range(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], first: int, bucket: Tensor) -> None:
    """Fill `bucket` with the image's bytes from `first` on. Tensors may be cut anywhere between two elements."""
    last, end = first + len(bucket), first
    begin = bisect_right(specs, first, key=lambda spec: spec.offset) - 1
    for spec in specs[max(begin, 0) :]:
        if spec.offset >= last:
            break
        start, stop = max(first, spec.offset), min(last, spec.offset + spec.nbytes)
        if start >= stop:
            continue
        if end < start:
            bucket[end - first : start - first].zero_()
        dtype = getattr(torch, spec.dtype)
        elements = slice((start - spec.offset) // dtype.itemsize, (stop - spec.offset) // dtype.itemsize)
        source = tensors[spec.name].detach().reshape(-1)
        _cast(source[elements], bucket[start - first : stop - first].view(dtype))
        end = stop
    if end < last:
        bucket[end - first :].zero_()


def place(spec: TensorSpec, image: Tensor) -> Tensor:
    """The part of `image` that holds the tensor, as one."""
    raw = image[spec.offset : spec.offset + spec.nbytes]
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """From one contiguous uint8 tensor to another of its length."""
    if source.device.type == "cpu" and target.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _cast(source: Tensor, target: Tensor) -> None:
    """Between flat tensors."""
    if target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source, non_blocking=True)
    elif source.dtype == target.dtype:
        copy_bytes(flat_bytes(source), flat_bytes(target))
    elif torch.get_num_threads() == 1:
        target.copy_(source)
    else:
        torch._foreach_copy_(list(target.split(_ONE_THREAD)), list(source.split(_ONE_THREAD)))
