"""The sync room's interface: weights flow from the trainer to the engines in five stages.

    announce ──▶ transfer ──▶ verify ──▶ swap ──▶ acknowledge

A sender puts a version's bytes where receivers can fetch them and describes them in a manifest. A receiver
brings them into standby buffers. Nothing a running forward pass reads is touched before the swap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headrace.records import Record, WeightVersion, message

if TYPE_CHECKING:
    import torch


class TensorSpec(Record):
    """One tensor of a payload: its place in the payload's bytes, and the digest of its own (`sync.digest`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


class AdapterSpec(Record):
    """A LoRA adapter: y = W x + (alpha / rank) · B (A x) for each target module."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]


@message
class Manifest(Record):
    """What a version consists of and how to know that all of it arrived."""

    version: WeightVersion
    payload: str
    transport: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int
    location: dict[str, Any] = {}
    """Whatever the transport's receiving end needs to find the bytes."""


class AdapterSpec(Record):
    """A LoRA adapter: y = W x + (alpha / rank) · B (A x) for each target module."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]


class Sender(Protocol):
    """The trainer's end. One version is on offer at a time; a later `send` replaces it."""

    def send(self, version: WeightVersion, tensors: Mapping[str, torch.Tensor]) -> Manifest: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's end. `receive` may run in a thread of its own and touches only `standby`."""

    def receive(self, manifest: Manifest, standby: Mapping[str, torch.Tensor]) -> None: ...

    def close(self) -> None: ...
