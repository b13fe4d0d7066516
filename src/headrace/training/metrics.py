"""The trainer's share of a line of metrics.jsonl, as far as the batch alone decides it. NumPy only, no torch."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from headrace.records import Batch
from headrace.training.packing import TrainingSequence

LAG_BINS = (0, 1, 2, 4, 8, 16)
"""Where each begins, in versions."""


def batch_metrics(
    batch: Batch,
    sequences: list[TrainingSequence],
    policy: str = "policy",
    *,
    masked: Collection[str] = (),
) -> dict[str, float]:
    """Rewards, lengths and versions. Means are over what the name says: episodes, turns or tokens.

    Tokens are all that the step consumed, as the ledger counts them: also those of `masked` episodes, given by
    their ids, which are out of the loss.
    """
    episodes = list(batch.episodes)
    turns = [turn for episode in episodes for turn in episode.turns if turn.policy == policy]
    rewards = np.array([episode.reward for episode in episodes if episode.reward is not None], np.float64)
    ages = [
        np.concatenate(
            [batch.version - turn.versions for turn, flag in zip(s.turns, s.trained, strict=True) if flag]
        )
        for s in sequences
    ]
    lags = np.concatenate(ages) if ages else np.empty(0, np.int64)
    return {
        "reward_mean": _mean(rewards),
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "zero_advantage_frac": _zero_advantage_frac(batch),
        "length_mean": _mean([sum(len(turn.tokens) for turn in episode.turns) for episode in episodes]),
        "truncated_frac": _mean([turn.stop == "length" for turn in turns]),
        "masked_frac": _mean([episode.id in masked for episode in episodes]),
        "tokens_trained": float(sum(sequence.num_trained for sequence in sequences)),
        "groups_trained": float(len(batch.groups)),
        "staleness_mean": _mean(lags),
        "staleness_max": float(lags.max(initial=0)),
        "version_spread_max": float(max((age.max() - age.min() for age in ages), default=0)),
        "version_spread_batch": float(np.ptp(lags)) if len(lags) else 0.0,
        **lag_histogram(lags),
    }


def lag_histogram(lags: np.ndarray) -> dict[str, float]:
    """Shares of the trained tokens: `lag_2_3_frac` is of those that are two or three versions old."""
    found, _ = np.histogram(lags, [*LAG_BINS, np.inf])
    ends = [f"_{end - 1}" if end - 1 > start else "" for start, end in pairwise(LAG_BINS)]
    names = [f"lag_{start}{end}_frac" for start, end in zip(LAG_BINS, [*ends, "_up"], strict=True)]
    return dict(zip(names, (found / max(1, len(lags))).tolist(), strict=True))


def _zero_advantage_frac(batch: Batch) -> float:
    """Share of the episodes in groups whose advantages are all 0, as groups of equal rewards give them."""
    zero, start = 0, 0
    for group in batch.groups:
        end = start + len(group.episodes)
        if not batch.advantages[start:end].any():
            zero += end - start
        start = end
    return zero / max(1, start)


def _mean(values: np.ndarray | list[int] | list[bool]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
