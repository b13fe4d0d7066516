"""The full payload: every tensor, one after another, each on a 64-byte boundary."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from headrace.sync.base import TensorSpec
from headrace.sync.digest import digests

NAME = "full"
ALIGN = 64


def lay_out(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[list[TensorSpec], int]:
    """Where each tensor goes, still without a checksum, and the bytes of all. Floating-point tensors become
    `dtype`, or stay as they are with None."""
    specs, offset = [], 0
    for name, tensor in tensors.items():
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * kind.itemsize
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(kind).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
                nbytes=nbytes,
                checksum=0,
            )
        )
        offset += -(-nbytes // ALIGN) * ALIGN
    return specs, offset


def write(
    specs: list[TensorSpec], tensors: Mapping[str, torch.Tensor], segment: torch.Tensor
) -> tuple[TensorSpec, ...]:
    """Cast and copy each tensor to its place in `segment` (bytes, on the CPU); returns the specs, checksummed."""
    for spec in specs:
        place(spec, segment).copy_(tensors[spec.name].detach())
    sums = digests([segment[spec.offset : spec.offset + spec.nbytes] for spec in specs])
    return tuple(
        TensorSpec(
            name=spec.name,
            dtype=spec.dtype,
            shape=spec.shape,
            offset=spec.offset,
            nbytes=spec.nbytes,
            checksum=checksum,
        )
        for spec, checksum in zip(specs, sums, strict=True)
    )


def read(specs: tuple[TensorSpec, ...], segment: torch.Tensor, standby: Mapping[str, torch.Tensor]) -> None:
    """Copy each tensor from its place in `segment` into the standby tensor of its name, on any device."""
    raw = segment.numpy()
    for spec in specs:
        target = standby[spec.name]
        if target.device.type == "cpu" and target.is_contiguous():
            # By NumPy, which starts no threads: a second pool of OpenMP threads in the process, for the thread that
            # receives, makes libgomp sleep at every barrier of the first (decoding slowed down 2.4 times by it).
            np.copyto(target.view(-1).view(torch.uint8).numpy(), raw[spec.offset : spec.offset + spec.nbytes])
        else:
            target.copy_(place(spec, segment))


def place(spec: TensorSpec, segment: torch.Tensor) -> torch.Tensor:
    """The part of `segment` that holds the tensor, as one."""
    raw = segment[spec.offset : spec.offset + spec.nbytes]
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)
