"""The sync room's interface: weights flow from the trainer to the engines in five stages.

    announce ──▶ transfer ──▶ verify ──▶ swap ──▶ acknowledge

What travels (payload), how (transport) and when (schedule) are independent of each other:

    trainer's tensors ─▶ image ─▶ stream ═▶ Outlet ══ transport ══ Inlet ═▶ stream ─▶ standby buffers
                     cast    full: the image itself                      by the plan of the pairing
                             delta: what changed since `base`

A version's *image* is all of its tensors in one run of bytes. A manifest says where each lies in it; a seal, which
comes when the image is filled, has their checksums. Nothing that a forward pass reads is touched before the swap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.records import Record, WeightVersion, message

if TYPE_CHECKING:
    import torch

    from headrace.sync.deadline import Deadline


class TensorSpec(Record, eq=True):
    """One tensor of a version and its place in the image."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class AdapterSpec(Record, eq=True):
    """A LoRA adapter: y = W x + (alpha / rank) · B (A x) for each target module."""

    name: str
    rank: int
    alpha: float
    targets: tuple[str, ...]


class Stream(Record):
    """Bytes on offer: a whole image, or what changed in it since the version `base`."""

    number: int
    """The version they lead to."""
    nbytes: int
    base: int | None = None
    """None: the stream is the image."""
    location: dict[str, Any] = {}
    """Whatever the transport's receiving end needs to find the bytes."""


@message
class Manifest(Record):
    """What a version consists of and where its bytes are."""

    version: WeightVersion
    payload: str
    """As configured. A version of the payload "delta" may still be offered whole."""
    transport: str
    tensors: tuple[TensorSpec, ...]
    """In the order of their places."""
    nbytes: int
    """Of the image."""
    streams: tuple[Stream, ...]
    """Applied in order, from the first that fits what a receiver has, they give this version."""
    adapter: AdapterSpec | None = None
    """The tensors are this adapter's, not the model's."""

    def route(self, has: int | None) -> tuple[Stream, ...]:
        """The streams that a receiver with version `has` needs; empty where they do not lead here from there."""
        for first in range(len(self.streams) - 1, -1, -1):
            base = self.streams[first].base
            if base is None or base == has:
                return self.streams[first:]
        return ()


@message
class Seal(Record):
    """The checksums of a version's tensors, in the manifest's order: its image is complete."""

    number: int
    checksums: tuple[int, ...]


class Destination(Record):
    """An engine that a version is for, and the version it has."""

    name: str
    version: int


class Outlet(Protocol):
    """A transport's sending end. It knows bytes alone. One stream is on offer at a time.

    Used by one thread. It never waits for receivers, so a slow or dead one cannot hold the trainer up.
    """

    name: str
    align: int
    """A tensor's place in an image is a multiple of this, in bytes."""
    keeps: bool
    """Whether streams stay where they are until `retain` lets go of them."""

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> torch.Tensor:
        """Memory (uint8, on the host or on `device`) for the last stream of `draft`, whose location is not known
        yet. What was on offer before is not any more, and whoever still reads it is told so."""
        ...

    def location(self) -> dict[str, Any]:
        """Of the stream that was opened last."""
        ...

    def advance(self, filled: int) -> None:
        """The first `filled` bytes are there and stay as they are. With all of them the stream is complete."""
        ...

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        """Offer the bytes of the last stream once more, as they are, to these. Returns the location."""
        ...

    def retain(self, numbers: Sequence[int]) -> None:
        """Of transports that keep streams: only those that lead to these versions are needed any more."""
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """A transport's receiving end, in an engine's process. Used by one thread."""

    def chunks(
        self, stream: Stream, deadline: Deadline, into: torch.Tensor | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset, bytes) from the first byte to the last, as they arrive. A chunk is valid until the next one is
        asked for. Where `into` is given (uint8, as long as the stream) chunks may be written there at once; they
        are then views of it. Raises SyncError("transfer", …) when the stream is replaced by another, also after
        the last chunk, and DeadlineExceeded."""
        ...

    def close(self) -> None: ...
