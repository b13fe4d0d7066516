"""The keys that every line of metrics.jsonl has. More may be added to a line; none of these is left out."""

from __future__ import annotations

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
