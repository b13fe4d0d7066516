"""What an update adds up over its tokens, what may not be among it, and the metrics that come of it. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import HeadraceError, RecordError

SUMS = (
    *("loss", "entropy", "kl", "clipped", "outliers", "ratios", "squared_ratios"),
    *("weights", "squared_weights", "dropped"),
    *("fresh_kl", "fresh", "impossible", "reference_kl", "divergence"),
)
"""Over an update's tokens, in this order."""

Total = dict[str, float]
"""`SUMS`, and the number of tokens."""


class Mismatch(NamedTuple):
    """How far engine and trainer are apart in numerics alone."""

    kl: float
    """Over tokens that the trainer's very version sampled, when there last were some."""
    age: int
    """Steps since. -1: there never were."""

    def after(self, first: Total) -> Mismatch:
        """A step whose first update has these sums."""
        if first["fresh"]:
            return Mismatch(first["fresh_kl"] / first["fresh"], 0)
        return self._replace(age=self.age + (self.age >= 0))


NEVER_SEEN = Mismatch(0.0, -1)


def check_numbers(total: Total, grad_norm: float) -> None:
    if total["impossible"]:
        raise RecordError(
            "a sampled token lies within its recorded support",
            f"{int(total['impossible'])} tokens do not",
            "look at the support column of the engine that sampled them",
        )
    if not (math.isfinite(grad_norm) and all(map(math.isfinite, total.values()))):
        raise HeadraceError(
            "a training step's loss, log-probs and gradient are finite",
            {"loss": total["loss"], "kl": total["kl"], "grad_norm": grad_norm},
            "lower training.optimizer.learning_rate, or train in float32",
        )


def step_metrics(updates: Sequence[Total], mismatch: Mismatch) -> dict[str, float]:
    """Means over the trained tokens of a batch's updates.

    Those of ratios to what was recorded are of the first update, before anything of the batch was learned. `kl` is
    the k3 estimate of how far the trainer's policy is from the one that sampled, and it has two causes: numerics,
    `mismatch_kl`, and the policy's own movement, `drift_kl`, which is what tokens of older versions have more. Of n
    tokens, as many as `effective_sample_frac` · n that needed no ratio would estimate as well.
    """
    all_of_them = {name: sum(total[name] for total in updates) for name in (*SUMS, "tokens")}
    count, first = max(1.0, all_of_them["tokens"]), updates[0]
    seen, stale = max(1.0, first["tokens"]), first["tokens"] - first["fresh"]
    return {
        "loss": all_of_them["loss"] / len(updates),
        "entropy": all_of_them["entropy"] / count,
        "kl": first["kl"] / seen,
        "clip_frac": all_of_them["clipped"] / count,
        "ratio_outlier_frac": first["outliers"] / seen,
        "weight_mean": all_of_them["weights"] / count,
        "weight_zero_frac": all_of_them["dropped"] / count,
        "effective_sample_frac": first["ratios"] ** 2 / (seen * first["squared_ratios"] or 1.0),
        "weighted_sample_frac": all_of_them["weights"] ** 2 / (count * all_of_them["squared_weights"] or 1.0),
        "mismatch_kl": mismatch.kl,
        "mismatch_age": float(mismatch.age),
        "drift_kl": max(0.0, (first["kl"] - first["fresh_kl"]) / stale - mismatch.kl) if stale else 0.0,
        "reference_kl": all_of_them["reference_kl"] / count,
        "teacher_divergence": all_of_them["divergence"] / count,
        "updates": float(len(updates)),
    }
