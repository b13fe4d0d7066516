"""What a run did between its first steps, which fill the pipeline, and its last, which drain it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

STATES = ("busy", "idle", "overhead")


class Window(NamedTuple):
    steps: int
    wall_s: float
    tokens: int
    """Trained on."""
    error_frac: float
    """Standard error of a token's seconds, as a share of them, by how steps differ; 0 of a single one."""
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

    times = [line["time_s"] for line in lines[skipped - 1 : len(lines) - left_out]]
    wall_s, tokens = times[-1] - times[0], [line["tokens_trained"] for line in counted]
    off = [
        end - begin - wall_s * trained / sum(tokens)
        for begin, end, trained in zip(times, times[1:], tokens, strict=False)
    ]
    spread = statistics.stdev(off) * len(off) ** 0.5 if len(off) > 1 else 0.0
    return Window(
        steps=len(counted),
        wall_s=wall_s,
        tokens=sum(tokens),
        error_frac=spread / wall_s,
        engine=spent("engine"),
        trainer=spent("trainer"),
        staleness_mean=sum(line["staleness_mean"] for line in counted) / len(counted),
        staleness_max=max(line["staleness_max"] for line in counted),
    )
