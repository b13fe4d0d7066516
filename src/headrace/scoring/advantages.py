"""How much better an episode did than others. NumPy only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from headrace.errors import RecordError
from headrace.records import Episode, Group
from headrace.scoring.base import Comparison, Overlong, Truncated

STD_EPS = 1e-6
Baseline = Literal["group", "others", "none"]
Scale = Literal["group", "batch", "none"]


def advantages(
    groups: Sequence[Group],
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
    over: Literal["episodes", "tokens"] = "episodes",
    unbiased: bool = False,
    eps: float = STD_EPS,
    truncated: Truncated = "train",
    overlong: Overlong | None = None,
    dtype: type[np.floating] = np.float32,
) -> np.ndarray:
    """One per episode in batch order, computed in float64.

    `baseline` is what a reward is compared with: the mean of its group, that of the group's others, or nothing.
    `scale`: divided by the standard deviation over the group, or over the batch, whose mean is then 0, and `eps`
    more. It is the population's (divided by n), or with `unbiased` the sample's (by n − 1). `over` is what the
    batch's mean and deviation count: each episode once, or once for each of its sampled tokens. Where all that are
    compared are equal, also where there is one, all are exactly 0; but over tokens the mean of the batch is
    subtracted even from them. An episode that `is_masked` has 0; with "exclude" the others are compared as if it
    were not there.
    Raises RecordError for an episode without a finite reward.
    """
    parts, counted = [], []
    for group in groups:
        rewards = _rewards(group, overlong)
        counts = np.array([truncated != "exclude" or not is_truncated(e) for e in group.episodes], bool)
        part = np.zeros(len(rewards))
        by_std = scale == "group"
        part[counts] = _compared(rewards[counts], baseline, by_std=by_std, unbiased=unbiased, eps=eps)
        parts.append(part)
        counted.append(counts)
    episodes = [episode for group in groups for episode in group.episodes]
    together = np.concatenate(parts) if parts else np.empty(0)
    if scale == "batch" and parts:
        counts = np.concatenate(counted)
        if over == "tokens":
            lengths = np.array([episode.num_tokens for episode in episodes])[counts]
            together[counts] = _centred_by_tokens(together[counts], lengths, unbiased=unbiased, eps=eps)
        elif baseline == "none":
            together[counts] = _centred(together[counts], by_std=True, unbiased=unbiased, eps=eps)
        else:
            # Within groups they are centred already; their mean is rounding, and a 0 is to stay one.
            together[counts] = together[counts] / (_std(together[counts], unbiased) + eps)
    together[[is_masked(episode, truncated) for episode in episodes]] = 0.0
    return together.astype(dtype)


def compared(groups: Sequence[Group], how: Comparison) -> np.ndarray:
    """`advantages` as a run's configuration has them."""
    return advantages(groups, **how._asdict())


def is_truncated(episode: Episode) -> bool:
    """Whether its last turn was cut at its most tokens, so that its reward is of an unfinished answer."""
    return bool(episode.turns) and episode.turns[-1].stop == "length"


def is_masked(episode: Episode, truncated: Truncated) -> bool:
    """Whether its tokens are left out of the loss."""
    return truncated != "train" and is_truncated(episode)


def group_advantages(groups: Sequence[Group], normalise_std: bool) -> np.ndarray:
    """`advantages` within groups: (reward − mean) / (std + 1e-6), or without the division."""
    return advantages(groups, scale="group" if normalise_std else "none")


def shuffle_rewards(groups: Sequence[Group], *, seed: int) -> list[Group]:
    """The same groups with all their rewards permuted: a control under which nothing can be learned."""
    rewards = [e.reward for group in groups for e in group.episodes]
    rest = iter([rewards[i] for i in np.random.default_rng(seed).permutation(len(rewards))])
    return [
        msgspec.structs.replace(group, episodes=tuple(e.with_(reward=next(rest)) for e in group.episodes))
        for group in groups
    ]


def _rewards(group: Group, overlong: Overlong | None) -> np.ndarray:
    for episode in group.episodes:
        if episode.reward is None or not np.isfinite(episode.reward):
            raise RecordError(
                f"an episode that is trained on has a finite reward; episode {episode.id!r} has not",
                episode.reward,
                "make the scorer return a number, or fail the episode with a reason",
            )
    rewards = np.array([episode.reward for episode in group.episodes], np.float64)
    if overlong is None:
        return rewards
    lengths = np.array([sum(len(turn.tokens) for turn in episode.turns) for episode in group.episodes])
    begins = overlong.limit - overlong.buffer
    return rewards + overlong.penalty * np.clip((begins - lengths) / overlong.buffer, -1.0, 0.0)


def _compared(rewards: np.ndarray, baseline: Baseline, *, by_std: bool, unbiased: bool, eps: float) -> np.ndarray:
    if baseline == "none":
        return rewards / (_std(rewards, unbiased) + eps) if by_std else rewards
    centred = _centred(rewards, by_std=by_std, unbiased=unbiased, eps=eps)
    # r − mean of the others = (r − mean of all) · n / (n − 1)
    return centred * len(rewards) / max(1, len(rewards) - 1) if baseline == "others" else centred


def _centred(rewards: np.ndarray, *, by_std: bool, unbiased: bool, eps: float) -> np.ndarray:
    # The mean of equal numbers can differ from them by rounding, which the division would blow up.
    if len(rewards) == 0 or rewards.min() == rewards.max():
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    return centred / (_std(rewards, unbiased) + eps) if by_std else centred


def _centred_by_tokens(values: np.ndarray, lengths: np.ndarray, *, unbiased: bool, eps: float) -> np.ndarray:
    said = values[lengths > 0]
    if len(said) == 0 or said.min() == said.max():
        return np.zeros(len(values))
    tokens = lengths.sum()
    centred = values - (lengths * values).sum() / tokens
    return centred / (np.sqrt((lengths * centred**2).sum() / (tokens - unbiased)) + eps)


def _std(values: np.ndarray, unbiased: bool) -> float:
    """That of a single value is 0, by either count."""
    return float(values.std(ddof=int(unbiased))) if len(values) > 1 else 0.0
