"""The telemetry room's interface. Telemetry may fail without stopping training; it never blocks the caller."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.records import Batch


class Telemetry(Protocol):
    """Where a run says what happens. Calls return at once; writing is done elsewhere, in order."""

    def step(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """One line of events.jsonl, stamped with the time: started, published, evaluated, dropped, …"""
        ...

    def batch(self, batch: Batch, produced: int, teacher: int | None = None) -> None:
        """The episodes one step trained on, and the version it produced. `teacher`: as in its StepReport."""
        ...

    async def close(self) -> None:
        """Everything said so far is on disk."""
        ...
