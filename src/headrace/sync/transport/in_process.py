"""Weights within one process: the sender packs a copy, the receiver reads it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from headrace.errors import SyncError
from headrace.records import WeightVersion
from headrace.sync.base import Manifest
from headrace.sync.payload import full

NAME = "in_process"


class Shelf:
    """What both ends share: the bytes on offer and the number of the `send` that put them there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generation = 0
        self.segment = torch.empty(0, dtype=torch.uint8)


class InProcessSender:
    def __init__(self, shelf: Shelf, dtype: torch.dtype | None = None):
        self._shelf = shelf
        self._dtype = dtype

    def send(self, version: WeightVersion, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        """Put a copy on the shelf, cast to the published dtype. Waits for a `receive` that is under way."""
        specs, nbytes = full.lay_out(tensors, self._dtype)
        with self._shelf.lock:
            if self._shelf.segment.numel() < nbytes:
                self._shelf.segment = torch.empty(nbytes, dtype=torch.uint8)
            self._shelf.generation += 1
            written = full.write(specs, tensors, self._shelf.segment)
            location = {"generation": self._shelf.generation}
        return Manifest(
            version=version, payload=full.NAME, transport=NAME, tensors=written, nbytes=nbytes, location=location
        )

    def close(self) -> None:
        with self._shelf.lock:
            self._shelf.generation += 1
            self._shelf.segment = torch.empty(0, dtype=torch.uint8)


class InProcessReceiver:
    def __init__(self, shelf: Shelf):
        self._shelf = shelf

    def receive(self, manifest: Manifest, standby: Mapping[str, torch.Tensor]) -> None:
        with self._shelf.lock:
            if manifest.location.get("generation") != self._shelf.generation:
                raise SyncError(
                    "transfer", NAME, f"version {manifest.version.number} is no longer on offer: a later one is"
                )
            full.read(manifest.tensors, self._shelf.segment, standby)

    def close(self) -> None:
        pass
