"""How much better an episode did than others. NumPy only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from headrace.errors import RecordError
from headrace.records import Group
from headrace.scoring.base import Overlong

STD_EPS = 1e-6
Baseline = Literal["group", "others", "none"]
Scale = Literal["group", "batch", "none"]


def advantages(
    groups: Sequence[Group],
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
    overlong: Overlong | None = None,
    dtype: type[np.floating] = np.float32,
) -> np.ndarray:
    """One per episode in batch order, computed in float64.

    `baseline` is what a reward is compared with: the mean of its group, that of the group's others, or nothing.
    `scale`: divided by the standard deviation over the group, or over the batch, whose mean is then 0. It is the
    population's (divided by n, not n − 1), and 1e-6 more. Where all that are compared are equal, also where there
    is one, all are exactly 0. Raises RecordError for an episode without a finite reward.
    """
    parts = [_compared(_rewards(group, overlong), baseline, scale == "group") for group in groups]
    together = np.concatenate(parts) if parts else np.empty(0)
    if scale == "batch":
        # Within groups they are centred already; their mean is rounding, and a 0 is to stay one.
        together = _centred(together, True) if baseline == "none" else together / (together.std() + STD_EPS)
    return together.astype(dtype)


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


def _compared(rewards: np.ndarray, baseline: Baseline, by_std: bool) -> np.ndarray:
    if baseline == "none":
        return rewards / (rewards.std() + STD_EPS) if by_std else rewards
    centred = _centred(rewards, by_std)
    # r − mean of the others = (r − mean of all) · n / (n − 1)
    return centred * len(rewards) / max(1, len(rewards) - 1) if baseline == "others" else centred


def _centred(rewards: np.ndarray, by_std: bool) -> np.ndarray:
    # The mean of equal numbers can differ from them by rounding, which the division would blow up.
    if len(rewards) == 0 or rewards.min() == rewards.max():
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPS) if by_std else centred
