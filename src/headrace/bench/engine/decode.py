"""Decode steps: so many sequences of such a context, whole engine steps by wall clock, beside the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.bench.engine import drive
from headrace.bench.engine.limit import limit_s, read_bandwidth
from headrace.bench.engine.power import Meter
from headrace.bench.engine.shapes import config_of
from headrace.engine.native import NativeEngine


class Point(NamedTuple):
    sequences: int
    context: int
    """Positions that a sequence attends to, on average over the timed steps."""

    def __str__(self) -> str:
        return f"{self.sequences}x{self.context}"


POINTS = {
    "0.6b": (Point(64, 512), Point(256, 512), Point(512, 512)),
    "8b": (Point(64, 512), Point(256, 512), Point(64, 4096)),
    "32b": (Point(64, 512),),
    "tiny": (Point(4, 160), Point(8, 160)),
}
HEADLINE = {"0.6b": Point(256, 512), "8b": Point(256, 512), "32b": Point(64, 512), "tiny": Point(8, 160)}
"""Each shape's point whose figures are kept."""
STEPS = 64
SHORTER = 48
"""Tokens by which a prompt is shorter than it could be: decoded before the timed steps, as many as it then takes to
have the wanted context, whatever was sampled beside the prefill."""


def measure(
    shape: str,
    device: torch.device,
    *,
    points: Sequence[Point] | None = None,
    bandwidth: float | None = None,
    steps: int = STEPS,
    seed: int = 0,
    **settings: Any,
) -> list[dict[str, Any]]:
    """A row for each point, all from one engine with room for the largest of them.

    `bandwidth` is in bytes a second, measured here if not given; `settings` are fields of the engine's
    configuration.
    """
    points = POINTS[shape] if points is None else points
    bandwidth = read_bandwidth(device) if bandwidth is None else bandwidth
    growth = drive.FILL_STEPS + drive.WARMUP_STEPS + SHORTER + steps
    engine = drive.make_engine(
        shape,
        device,
        running=max(point.sequences for point in points),
        context=max(point.context for point in points) + growth,
        cache_tokens=max(point.sequences * (point.context + steps + drive.SPARE_TOKENS) for point in points),
        seed=seed,
        standby=False,
        **settings,
    )
    rng = np.random.default_rng(seed)
    rows = []
    for point in points:
        drive.say(f"decode {shape} {point} …")
        seconds, context, drawn = time_point(engine, device, rng, config_of(shape).vocab_size, point, steps)
        limit = limit_s(config_of(shape), point.sequences, context, bandwidth)
        row = {
            "part": "decode",
            "shape": shape,
            "point": str(point),
            "context_mean": context,
            "ms_per_step": 1e3 * seconds,
            "tok_s": point.sequences / seconds,
            "limit_ms": 1e3 * limit,
            "limit_frac": limit / seconds,
            "bandwidth_gb_s": bandwidth / 1e9,
            **drawn,
        }
        rows.append(drive.kept(row))
    return rows


def time_point(
    engine: NativeEngine, device: torch.device, rng: np.random.Generator, vocabulary: int, point: Point, steps: int
) -> tuple[float, float, dict[str, float]]:
    """(seconds of a step, mean context over the timed steps, what `Meter` read). Leaves the engine empty."""
    start = point.context - steps / 2
    prompt = max(1, round(start) - drive.WARMUP_STEPS - SHORTER)
    before = engine.tokens_sampled
    prompts = drive.random_prompts(rng, vocabulary, point.sequences, prompt)
    ids = drive.fill(engine, prompts, drive.FILL_STEPS + drive.WARMUP_STEPS + SHORTER + steps)
    sampled = (engine.tokens_sampled - before) / point.sequences
    drive.seconds_per_step(engine, max(drive.WARMUP_STEPS, round(start - prompt - sampled)), warmup=0)
    meter = Meter(device)
    seconds = drive.seconds_per_step(engine, steps, warmup=0)
    drawn = meter.read()
    return seconds, drive.cut(engine, ids) - (steps - 1) / 2, drawn


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = {}
    for row in rows:
        shape = row["shape"]
        if row["point"] == str(HEADLINE[shape]):
            found[f"decode_limit_frac_{shape}_{row['point']}"] = row["limit_frac"]
            found[f"tok_s_{shape}"] = row["tok_s"]
    return found
