"""Metrics that have left their healthy range for a while, each with advice. Formulas: docs/off-policy.md."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PATIENCE = 5
"""Steps in a row after which it is not chance any more, in either direction."""


class Rule(NamedTuple):
    metric: str
    low: float
    high: float
    advice: str
    where: str | None = None
    """Lines in which this metric is 0 say nothing of it."""


RULES = (
    Rule(
        "mismatch_kl", 0.0, 0.01,
        "engine and trainer compute the same tokens' log-probs differently: give them one dtype and one back end, "
        'set both numerics to "exact", or let one of the corrections tis and mis weigh tokens',
        where="lag_0_frac",
    ),
    Rule(
        "drift_kl", 0.0, 0.1,
        "the policy has moved far from the one that sampled: lower buffer.max_staleness or the learning rate, or "
        "publish more often (sync.interval); where mismatch_age is -1, numerics may have a part in it",
    ),
    Rule(
        "ratio_outlier_frac", 0.0, 0.05,
        "many tokens are half or twice as likely by now: lower buffer.max_staleness or the learning rate, and have "
        "a correction that bounds weights, as tis does",
    ),
    Rule(
        "effective_sample_frac", 0.5, 1.0,
        "the policy that sampled and the one that learns have little in common: lower buffer.max_staleness or the "
        "learning rate, or look for what engine and trainer compute differently",
    ),
    Rule(
        "weighted_sample_frac", 0.5, 1.0,
        "few tokens carry the gradient: lower buffer.max_staleness, or change the corrections' caps and bounds",
    ),
    Rule(
        "weight_zero_frac", 0.0, 0.3,
        "corrections drop much of what was sampled: widen their bounds, or lower buffer.max_staleness",
    ),
    Rule(
        "clip_frac", 0.0, 0.3,
        "the clip holds back much of the gradient: lower the learning rate, training.epochs or "
        "buffer.max_staleness, or add a correction that weighs tokens, so that the clip is about this step alone",
    ),
    Rule(
        "zero_advantage_frac", 0.0, 0.9,
        "most groups have equal rewards and teach nothing: use tasks of other difficulty, or dapo's resample, "
        "which draws such groups anew",
    ),
)  # fmt: skip


class Change(NamedTuple):
    """An alarm that begins, or ends."""

    on: bool
    rule: Rule
    value: float
    """The metric's at this step."""


class Alarms:
    """Those of one run. A metric that a line does not have is left as it was."""

    def __init__(self, rules: Sequence[Rule] = RULES, patience: int = PATIENCE):
        self._rules = rules
        self._seen: dict[str, deque[bool]] = {rule.metric: deque(maxlen=patience) for rule in rules}
        self._on: set[str] = set()

    @property
    def on(self) -> frozenset[str]:
        """The metrics concerned."""
        return frozenset(self._on)

    def look(self, line: Mapping[str, Any]) -> list[Change]:
        """At a step's metrics."""
        changes = []
        for rule in self._rules:
            value = line.get(rule.metric)
            if not isinstance(value, int | float) or (rule.where is not None and not line.get(rule.where, 1)):
                continue
            seen = self._seen[rule.metric]
            seen.append(rule.low <= value <= rule.high)
            was = rule.metric in self._on
            if len(seen) == seen.maxlen and len(set(seen)) == 1 and seen[0] == was:
                self._on ^= {rule.metric}
                changes.append(Change(not was, rule, float(value)))
        return changes
