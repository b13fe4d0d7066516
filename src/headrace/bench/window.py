"""What a run did between its first steps, which fill the pipeline, and its last, which drain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

STATES = ("busy", "idle", "overhead")


class Window(NamedTuple):
    steps: int
    wall_s: float
    tokens: int
    """Trained on."""
    engine: dict[str, float]
    """Seconds in each of `STATES`; of several engines on average."""
    trainer: dict[str, float]
    staleness_mean: float
    staleness_max: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def window(lines: Sequence[dict[str, Any]], skipped: int, left_out: int = 0) -> Window:
    """Of a run's metrics, one line a step, without the first `skipped` steps, at least one, and `left_out` last."""
    counted = lines[skipped : len(lines) - left_out]
    first, last = lines[skipped - 1], counted[-1]

    def spent(who: str) -> dict[str, float]:
        return {state: last[f"{who}_{state}_s"] - first[f"{who}_{state}_s"] for state in STATES}

    return Window(
        steps=len(counted),
        wall_s=last["time_s"] - first["time_s"],
        tokens=sum(line["tokens_trained"] for line in counted),
        engine=spent("engine"),
        trainer=spent("trainer"),
        staleness_mean=sum(line["staleness_mean"] for line in counted) / len(counted),
        staleness_max=max(line["staleness_max"] for line in counted),
    )
