"""The keys that every line of metrics.jsonl has, and those that users' metrics get. The first are always there."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

METRIC_KEYS: tuple[str, ...] = (
    "step",
    "version",
    "time_s",
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "clip_frac",
    "zero_advantage_frac",
    "length_mean",
    "truncated_frac",
    "tokens_trained",
    "groups_trained",
    "staleness_mean",
    "staleness_max",
    "version_spread_max",
    "mismatch_kl",
    "ratio_outlier_frac",
    "dropped",
    "trainer_idle_frac",
    "engine_idle_frac",
    "gen_tokens_per_s",
    "train_tokens_per_s",
    "sync_s",
    "swap_pause_s",
    "buffer_groups",
)

USER = "user/"
"""What keys of users' metrics begin with: user/NAME."""
MAX_USER_KEYS = 256
"""Users' metrics in one line: those that most episodes have. The rest stands with the episodes alone."""
SUMMARISED_STEPS = 10


def users_means(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """By name, the mean over the episodes that have it; at most MAX_USER_KEYS, in alphabetical order."""
    values: dict[str, list[float]] = {}
    for one in metrics:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    commonest = sorted(values, key=lambda name: (-len(values[name]), name))[:MAX_USER_KEYS]
    return {name: mean(values[name]) for name in sorted(commonest)}


def mean(values: Sequence[float]) -> float:
    """The mean of one value or more, also where their sum would overflow."""
    n = len(values)
    if max(map(abs, values)) < sys.float_info.max / n:
        return math.fsum(values) / n
    return math.fsum(value / n for value in values)


def users_keys(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The same under the keys that they have in a step's line."""
    return {USER + name: mean for name, mean in users_means(metrics).items()}


def users_summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By name, the mean of users' metrics over the last SUMMARISED_STEPS lines."""
    found = [
        {key.removeprefix(USER): value for key, value in line.items() if key.startswith(USER)}
        for line in lines[-SUMMARISED_STEPS:]
    ]
    return users_means([{k: float(v) for k, v in one.items() if isinstance(v, int | float)} for one in found])
