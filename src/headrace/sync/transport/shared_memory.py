"""Weights through memory that two processes share.

    offset  size  field
    0       8     generation: number of the `send` whose bytes follow; 0 while they are being written
    8       56    zero
    64      …     the payload

The segment is an anonymous file whose descriptor the parent creates and both processes inherit: nothing is left
behind when they end, however they end. Neither end closes the descriptor; it belongs to who created it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping

import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion
from headrace.sync.base import Manifest
from headrace.sync.payload import full

NAME = "shared_memory"
_HEADER_BYTES = 64
_GENERATION = struct.Struct("<Q")


class _Segment:
    """The descriptor's file, mapped as far as was needed so far."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def mapped(self, nbytes: int, *, grow: bool) -> mmap.mmap:
        """At least header and payload of `nbytes`. The file grows only with `grow`, and never shrinks."""
        wanted = _HEADER_BYTES + nbytes
        if self._map is None or len(self._map) < wanted:
            size = os.fstat(self._descriptor).st_size
            if size < wanted and grow:
                os.ftruncate(self._descriptor, wanted)
                size = wanted
            if size < wanted:
                raise SyncError("transfer", NAME, f"the segment has {size} bytes of the {wanted} announced")
            self.close()
            self._map = mmap.mmap(self._descriptor, size)
        return self._map

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class SharedMemorySender:
    """Casts floating-point tensors to `dtype`; None sends them as they are."""

    def __init__(self, descriptor: int, dtype: torch.dtype | None = None):
        self._segment = _Segment(descriptor)
        self._dtype = dtype
        self._generation = 0

    def send(self, version: WeightVersion, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Write the payload. A `receive` still under way then fails: send when all have acknowledged."""
        specs, nbytes = full.lay_out(tensors, self._dtype)
        mapped = self._segment.mapped(nbytes, grow=True)
        self._generation += 1
        _GENERATION.pack_into(mapped, 0, 0)
        written = full.write(specs, tensors, _payload(mapped, nbytes))
        _GENERATION.pack_into(mapped, 0, self._generation)
        return Manifest(
            version=version,
            payload=full.NAME,
            transport=NAME,
            tensors=written,
            nbytes=nbytes,
            location={"generation": self._generation},
        )

    def close(self) -> None:
        self._segment.close()


class SharedMemoryReceiver:
    def __init__(self, descriptor: int):
        self._segment = _Segment(descriptor)

    def receive(self, manifest: Manifest, standby: Mapping[str, torch.Tensor]) -> None:
        """Copy the payload into `standby`. Raises when another `send` replaced it before or meanwhile."""
        mapped = self._segment.mapped(manifest.nbytes, grow=False)
        wanted = manifest.location.get("generation")
        for moment in ("before", "while"):
            if moment == "while":
                full.read(manifest.tensors, _payload(mapped, manifest.nbytes), standby)
            (found,) = _GENERATION.unpack_from(mapped, 0)
            if found != wanted:
                raise SyncError(
                    "transfer",
                    NAME,
                    f"version {manifest.version.number} was replaced by a later one {moment} it was copied",
                )

    def close(self) -> None:
        self._segment.close()


def _payload(mapped: mmap.mmap, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=_HEADER_BYTES)
