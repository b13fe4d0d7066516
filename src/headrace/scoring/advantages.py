"""How much better than its group an episode did. NumPy only, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.errors import RecordError
from headrace.records import Group

STD_EPS = 1e-6


def group_advantages(groups: Sequence[Group], normalise_std: bool) -> np.ndarray:
    """float32, one per episode in batch order: (reward − mean) / (std + 1e-6) over the episode's own group.

    `std` is the population's (divided by n, not n − 1); without `normalise_std` there is no division at all.
    A group of equal rewards, also one of a single episode, gives exactly 0. Raises RecordError for an episode
    without a finite reward.
    """
    parts = [_centred(_rewards(group), normalise_std) for group in groups]
    return np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)


def shuffle_rewards(groups: Sequence[Group], *, seed: int) -> list[Group]:
    """The same groups with all their rewards permuted: a control under which nothing can be learned."""
    rewards = [e.reward for group in groups for e in group.episodes]
    rest = iter([rewards[i] for i in np.random.default_rng(seed).permutation(len(rewards))])
    return [
        msgspec.structs.replace(group, episodes=tuple(e.with_(reward=next(rest)) for e in group.episodes))
        for group in groups
    ]


def _rewards(group: Group) -> np.ndarray:
    for episode in group.episodes:
        if episode.reward is None or not np.isfinite(episode.reward):
            raise RecordError(
                f"an episode that is trained on has a finite reward; episode {episode.id!r} has not",
                episode.reward,
                "make the scorer return a number, or fail the episode with a reason",
            )
    return np.array([episode.reward for episode in group.episodes], np.float64)


def _centred(rewards: np.ndarray, normalise_std: bool) -> np.ndarray:
    # The mean of equal numbers can differ from them by rounding, which the division would blow up.
    if len(rewards) == 0 or rewards.min() == rewards.max():
        return np.zeros(len(rewards))
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPS) if normalise_std else centred
