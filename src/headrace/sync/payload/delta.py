"""The delta payload: of each version only the elements whose stored bits changed since the one before. Lossless.

    old, new ─▶ gaps, differences ─▶ frame ─▶ … ─▶ frame ─▶ positions, differences ─▶ new
      changes.find          layers.pack     frames     layers.unpack         changes.add

A version is an image: the bytes of all tensors, one after another. Regions of it have elements of 1, 2, 4 or 8
bytes, and a frame holds the changes of a chunk, at most some million elements of one region.
Everything here is a function of its arguments; images may be on the CPU or on a CUDA device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from headrace.sync.payload import changes
from headrace.sync.payload.frames import MAX_ELEMENTS, Frame, frame_bytes, frames
from headrace.sync.payload.regions import Region, chunks

__all__ = ["Frame", "Region", "apply", "chunks", "delta_entropy", "encode", "encode_chunk", "frames"]

_MAX_THREADS = 8


def encode(
    old: torch.Tensor, new: torch.Tensor, regions: Iterable[Region], *, threads: int | None = None
) -> list[bytes]:
    """The frames that make `new` of `old`, two images on one device. Bytes outside the regions do not travel."""
    parts = [(region, region.of(old), region.of(new)) for region in chunks(regions)]
    if threads is None:
        threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        if old.device.type == "cpu":
            jobs = [pool.submit(_encode, *part) for part in parts]
        else:
            # Only this thread uses the device: in another, the current stream is not the caller's.
            jobs = [pool.submit(frame_bytes, changes.find(*part[1:]), part[0], part[2]) for part in parts]
        return [job.result() for job in jobs]


def encode_chunk(old: torch.Tensor, new: torch.Tensor, first: int, unit: int) -> bytes:
    """The frame of one chunk, at byte `first` of the image: two contiguous tensors of any type and shape."""
    region = Region(first, unit, new.nbytes // max(unit, 1))
    if region.nbytes != new.nbytes or region.count > MAX_ELEMENTS:
        raise ValueError(f"a chunk is {MAX_ELEMENTS} elements of {unit} bytes at most, got {new.nbytes} bytes")
    if old.nbytes != new.nbytes or not (old.is_contiguous() and new.is_contiguous()):
        shapes = [f"{chunk.dtype}{list(chunk.shape)}, strides {chunk.stride()}" for chunk in (old, new)]
        raise ValueError(f"two versions of a chunk are of one size and contiguous, got {' and '.join(shapes)}")
    return _encode(region, changes.whole_numbers(old, unit), changes.whole_numbers(new, unit))


def apply(frame: Frame, target: torch.Tensor) -> None:
    """Make the new elements of the old ones in `target`, which is `frame.of(image)`. A damaged frame raises
    SyncError and leaves `target` as it was."""
    region = frame.region
    if target.dtype != changes.SIGNED[region.unit] or target.shape != (region.count,):
        raise ValueError(f"a frame of {region} does not fit {target.dtype}{list(target.shape)}")
    if frame.bits is not None:
        changes.replace(target, frame.bits)
    else:
        changes.add(target, *frame.arrays())


def delta_entropy(old: torch.Tensor, new: torch.Tensor, tensors: Iterable[Region]) -> float:
    """Bits that changed positions and new values have, tensor by tensor, when every element changes with the same
    probability and every difference is drawn from those that occur: what a code without context can reach."""
    bits = 0.0
    for tensor in tensors:
        found = [changes.find(part.of(old), part.of(new)).differences for part in chunks([tensor])]
        differences = np.concatenate(found) if found else np.empty(0)
        _, counts = np.unique(differences, return_counts=True)
        bits += _entropy([len(differences), tensor.count - len(differences)]) + _entropy(counts.tolist())
    return bits


def _encode(region: Region, old: torch.Tensor, new: torch.Tensor) -> bytes:
    return frame_bytes(changes.find(old, new), region, new)


def _entropy(counts: list[int]) -> float:
    """Of that many of each kind, in any order: bits of all."""
    total = sum(counts)
    return sum(count * math.log2(total / count) for count in counts if count)
