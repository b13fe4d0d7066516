"""The training room's interface: batch in, weights out."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.records import Batch, Record, WeightVersion, message
from headrace.sync.base import Manifest
from headrace.usage import Usage


@message
class StepReport(Record):
    """What one training step did. `metrics` has the trainer's share of a line of metrics.jsonl."""

    step: int
    version: int
    """The version the step produced."""
    metrics: dict[str, float]
    seconds: float = 0.0


class Trainer(Protocol):
    """Owns the weights and the optimizer. Its calls are answered one at a time, in the order they were made."""

    async def train(self, batch: Batch) -> StepReport:
        """One optimizer step over the whole batch: version `batch.version` becomes the next one."""
        ...

    async def stage(self, version: WeightVersion) -> Manifest:
        """Put the current weights where engines can fetch them. Returns before any engine has."""
        ...

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        """Write a checkpoint: weights, optimizer, random state and `state`. The folder appears whole or not."""
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
