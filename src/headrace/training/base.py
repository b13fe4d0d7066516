"""The training room's interface: batch in, weights out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace.records import Batch, Record, WeightVersion, message
from headrace.sync.base import Destination, Manifest, Seal
from headrace.usage import Usage


@message
class StepReport(Record):
    """What one training step did. `metrics` has the trainer's share of a line of metrics.jsonl."""

    step: int
    version: int
    """The version the step produced."""
    metrics: dict[str, float]
    seconds: float = 0.0
    teacher: int | None = None
    """In self-distillation: the version that the policy learned from."""


class Trainer(Protocol):
    """Owns the weights and the optimizer. Its calls are answered one at a time, in the order they were made, but
    for those of publication, which are answered beside the others."""

    async def train(self, batch: Batch) -> StepReport:
        """One optimizer step over the whole batch: version `batch.version` becomes the next one."""
        ...

    async def stage(self, version: WeightVersion, to: Sequence[Destination]) -> Manifest:
        """Begin to offer the current weights to these engines, beside training: the next optimizer step waits until
        they are copied. Raises Superseded where the weights have another version by now."""
        ...

    async def seal(self, number: int) -> Seal:
        """The checksums of the version that was staged last, once it is copied."""
        ...

    async def restage(self, number: int, to: Sequence[Destination]) -> tuple[Manifest, Seal]:
        """Offer the version that was staged last once more, whole, to engines that could not take it."""
        ...

    async def save(self, folder: str, state: dict[str, Any]) -> str:
        """Write a checkpoint: weights, optimizer, random state and `state`. The folder appears whole or not.
        Returns the digest that its state.json has."""
        ...

    async def export(self, folder: str) -> None:
        """Write the current weights as a Hugging Face folder. The folder appears whole or not."""
        ...

    async def keep(self, version: int, file: str) -> None:
        """Write the current weights to one safetensors file, for `headrace audit --recompute`."""
        ...

    async def load(self, folder: str) -> dict[str, Any]:
        """Restore what `save` wrote; returns its `state`."""
        ...

    async def rename(self, version: int) -> None:
        """Call the weights as they are now by a new version number: after a restore, old numbers are spent."""
        ...

    async def usage(self) -> Usage: ...

    async def close(self) -> None: ...
