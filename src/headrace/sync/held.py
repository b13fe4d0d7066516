"""The image of the version that was published last, to find what changed since."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headrace.sync.base import TensorSpec
from headrace.sync.payload.changes import SIGNED, Changes, find
from headrace.sync.payload.frames import frame_bytes
from headrace.sync.payload.full import copy_bytes, pack, pack_range
from headrace.sync.payload.regions import Region, chunks

_THREADS = 8


class Held:
    def __init__(self, specs: tuple[TensorSpec, ...], nbytes: int, device: torch.device):
        self.specs = specs
        self.image = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.number: int | None = None
        """Of the version whose image it is."""

    def take(self, number: int, tensors: Mapping[str, Tensor], *, compare: bool) -> list[bytes]:
        """Hold these tensors from now on. Returns what changed, frame by frame, if that is asked for."""
        self.number = number
        if not compare:
            pack(self.specs, tensors, self.image)
            return []
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            if self.image.device.type == "cpu":
                frames = list(pool.map(lambda part: self._frame(part, *self._renewed(part, tensors)), self._parts))
            else:
                # Only this thread uses the device: in another, the current stream is not the caller's.
                jobs = [pool.submit(self._frame, part, *self._renewed(part, tensors)) for part in self._parts]
                frames = [job.result() for job in jobs]
        return [frame for frame in frames if frame]

    def _renewed(self, region: Region, tensors: Mapping[str, Tensor]) -> tuple[Changes, Tensor]:
        """What changed in a part of the image, and its new elements, which it then has."""
        old = self.image[region.first : region.first + region.nbytes]
        new = torch.empty_like(old)
        pack_range(self.specs, tensors, region.first, new)
        kind = SIGNED[region.unit]
        found = find(old.view(kind), new.view(kind))
        copy_bytes(new, old)
        return found, new.view(kind)

    @staticmethod
    def _frame(region: Region, found: Changes, new: Tensor) -> bytes:
        return frame_bytes(found, region, new) if len(found.gaps) else b""

    @property
    def _parts(self) -> Iterator[Region]:
        """Runs of tensors with one element size, cut."""
        runs: list[Region] = []
        for spec in self.specs:
            unit = getattr(torch, spec.dtype).itemsize
            if runs and runs[-1].unit == unit:
                end = spec.offset + spec.nbytes
                runs[-1] = Region(runs[-1].first, unit, (end - runs[-1].first) // unit)
            else:
                runs.append(Region(spec.offset, unit, spec.nbytes // unit))
        return chunks(runs)
