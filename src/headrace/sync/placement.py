"""An engine's standby buffers, addressed by places in a version's image."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.errors import SyncError
from headrace.sync.base import Manifest, Seal, TensorSpec
from headrace.sync.digest import ALIGN, Digester, copies_on_the_way, digests
from headrace.sync.payload.changes import SIGNED, add, replace
from headrace.sync.payload.delta import Frame, apply
from headrace.sync.payload.full import copy_bytes, flat_bytes
from headrace.sync.plan import Kind, plan, some


class _Part(NamedTuple):
    """Bytes `first` to `last` of the image and where they belong."""

    first: int
    last: int
    target: Tensor
    """uint8, contiguous."""


class Placement:
    """One pairing of a published layout with buffers: the plan, carried out. Raises SyncError("announce", …) where
    the two do not fit."""

    def __init__(self, tensors: Sequence[TensorSpec], nbytes: int, buffers: Mapping[str, Tensor], who: str):
        self._specs, self._nbytes, self._who = tensors, nbytes, who
        self._names, self._buffers, self._addresses = list(buffers), list(buffers.values()), _addresses(buffers)
        self._views = _views(tensors, buffers, who)
        self._parts = sorted(
            (
                _Part(tensors[i].offset, tensors[i].offset + tensors[i].nbytes, flat_bytes(view))
                for i, view in self._views
            ),
            key=lambda part: (part.first, part.last),
        )
        self._starts = [part.first for part in self._parts]
        self._digester: Digester | None = None
        self._copies: tuple[int, Digester] | None = None
        self._arrived: Callable[[], list[int]] | None = None
        """The digests of what was written last, where they were found on the way."""
        self._aligned = bool(self._parts) and all(
            place % ALIGN == 0 for part in self._parts for place in (part.first, part.target.data_ptr())
        )
        self.block = _one_block(self._parts, nbytes)
        """All of the buffers as one run of bytes in the image's own layout, where they are that."""

    def pairs(self, tensors: Sequence[TensorSpec], buffers: Mapping[str, Tensor]) -> bool:
        """Whether it is of these two."""
        if _addresses(dict(islice(buffers.items(), 1))) != self._addresses[:1]:
            return False
        # The same tensors lie where they lay: who moves them lets the receiver forget them first.
        same = list(buffers) == self._names and all(map(is_, buffers.values(), self._buffers))
        return (same or _addresses(buffers) == self._addresses) and tensors == self._specs

    def write(self, offset: int, chunk: Tensor) -> None:
        """Put bytes of the image, from `offset` on, where they belong."""
        self._arrived = None
        if len(chunk) == self._nbytes and self._aligned and copies_on_the_way(chunk, self._parts[0].target):
            self._arrived = self._copier(chunk).begin()
            return
        if self.block is not None:
            there = self.block[offset : offset + len(chunk)]
            if there.data_ptr() != chunk.data_ptr():
                copy_bytes(chunk, there)
            return
        end = offset + len(chunk)
        for part in self._touching(offset, end):
            first, last = max(offset, part.first), min(end, part.last)
            if first < last:
                copy_bytes(
                    chunk[first - offset : last - offset], part.target[first - part.first : last - part.first]
                )

    def apply(self, frame: Frame) -> None:
        """Change what a frame of a delta changes. The buffers hold the version it is against."""
        self._arrived = None
        if self.block is not None:
            apply(frame, frame.of(self.block))
            return
        region = frame.region
        end = region.first + region.nbytes
        positions, differences = frame.arrays() if frame.bits is None else (None, None)
        for part in self._touching(region.first, end):
            first, last = max(region.first, part.first), min(end, part.last)
            if first >= last:
                continue
            target = part.target[first - part.first : last - part.first].view(SIGNED[region.unit])
            begin, stop = (first - region.first) // region.unit, (last - region.first) // region.unit
            if positions is None or differences is None:
                assert frame.bits is not None
                replace(target, frame.bits[begin:stop])
            else:
                chosen = slice(*np.searchsorted(positions, [begin, stop]))
                add(target, positions[chosen] - begin, differences[chosen])

    def settle(self) -> None:
        """Wait until what was written is there."""
        if self._parts and self._parts[0].target.device.type == "cuda":
            torch.cuda.current_stream(self._parts[0].target.device).synchronize()

    def look(self) -> None:
        """Have the digests ready that were found on the way, before there is a seal to compare them with."""
        if self._arrived is not None:
            found = self._arrived()
            self._arrived = lambda: found

    def verify(self, manifest: Manifest, seal: Seal) -> None:
        """Raise SyncError("verify", …) unless the buffers' bytes have the seal's checksums."""
        number = manifest.version.number
        if seal.number != number or len(seal.checksums) != len(self._specs):
            raise SyncError("verify", self._who, f"the seal of version {seal.number} does not fit version {number}")
        found = self._digests() if self._arrived is None else self._arrived()
        self._arrived = None
        wrong = [
            self._specs[i].name
            for (i, _), digest in zip(self._views, found, strict=True)
            if digest != seal.checksums[i]
        ]
        if wrong:
            raise SyncError("verify", self._who, f"version {number}: checksums differ for {some(wrong)}")

    def _digests(self) -> list[int]:
        if self._digester is None:
            self._digester = Digester([view for _, view in self._views])
        return self._digester.digests()

    def _copier(self, image: Tensor) -> Digester:
        """Copies a whole image into the buffers and digests it on the way."""
        if self._copies is None or self._copies[0] != image.data_ptr():
            specs = [self._specs[i] for i, _ in self._views]
            parts = [image[spec.offset : spec.offset + spec.nbytes] for spec in specs]
            targets = [flat_bytes(view) for _, view in self._views]
            self._copies = image.data_ptr(), Digester(parts, targets)
        return self._copies[1]

    def _touching(self, first: int, last: int) -> Sequence[_Part]:
        """Parts that may overlap these bytes. Those of one source start together."""
        begin = bisect_right(self._starts, first) - 1
        while begin > 0 and self._starts[begin - 1] == self._starts[begin]:
            begin -= 1
        return self._parts[max(begin, 0) : bisect_right(self._starts, last)]


def checksums(tensors: Sequence[TensorSpec], parameters: Mapping[str, Tensor], who: str) -> tuple[int, ...]:
    """Of published tensors, as they are in these parameters. -1: one that is there twice differs in the two."""
    views = _views(tensors, parameters, who)
    found: list[set[int]] = [set() for _ in tensors]
    for (i, _), digest in zip(views, digests([view for _, view in views]), strict=True):
        found[i].add(digest)
    return tuple(next(iter(several)) if len(several) == 1 else -1 for several in found)


def _views(tensors: Sequence[TensorSpec], buffers: Mapping[str, Tensor], who: str) -> list[tuple[int, Tensor]]:
    """(which tensor, the rows of a buffer that hold it). Raises SyncError("announce", …) where they do not fit."""
    sources = {spec.name: Kind(spec.dtype, tuple(spec.shape)) for spec in tensors}
    if len(sources) != len(tensors):
        raise SyncError("announce", who, "a name is published twice")
    moves = plan(sources, {name: kind_of(buffer) for name, buffer in buffers.items()}, who)
    place = {spec.name: i for i, spec in enumerate(tensors)}
    views: list[tuple[int, Tensor]] = []
    for move in moves:
        buffer = buffers[move.target]
        views.append((place[move.source], buffer[move.first : move.last] if buffer.dim() else buffer))
    return views


def _addresses(buffers: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    return [(name, buffer.data_ptr()) for name, buffer in buffers.items()]


def kind_of(tensor: Tensor) -> Kind:
    return Kind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _one_block(parts: Sequence[_Part], nbytes: int) -> Tensor | None:
    """The memory that all parts lie in, if each lies there as in the image."""
    if not parts or parts[0].first != 0:
        return None
    first = parts[0].target
    storage, base = first.untyped_storage(), first.data_ptr()
    for part in parts:
        same = part.target.untyped_storage().data_ptr() == storage.data_ptr()
        if not same or part.target.data_ptr() - base != part.first:
            return None
    start = base - storage.data_ptr()
    if start + nbytes > storage.nbytes():
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, start, (nbytes,), (1,))
