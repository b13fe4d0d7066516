"""Batches of random tokens, for trainers that are timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from headrace.records import Batch, Episode, Group, Task, Turn

Asked = tuple[np.ndarray, int]
"""A prompt, and how many tokens follow it."""


def random_tokens(dice: np.random.Generator, vocabulary: int, count: int) -> np.ndarray:
    return dice.integers(0, vocabulary, count).astype(np.int32)


def random_batch(dice: np.random.Generator, vocabulary: int, groups: Iterable[Sequence[Asked]]) -> Batch:
    """Sampled by version 0 from all tokens alike; advantages from -1 to 1."""
    made = []
    for number, group in enumerate(groups):
        task = Task(id=str(number), prompt="")
        turns = [
            Turn(
                context=prompt,
                tokens=random_tokens(dice, vocabulary, length),
                logprobs=np.full(length, -math.log(vocabulary), np.float32),
                versions=np.zeros(length, np.int32),
                stop="length",
            )
            for prompt, length in group
        ]
        episodes = tuple(
            Episode(id=f"{number}.{place}", task=task, turns=(turn,), reward=0.0)
            for place, turn in enumerate(turns)
        )
        made.append(Group(id=str(number), sequence=number, task=task, episodes=episodes))
    count = sum(len(group.episodes) for group in made)
    return Batch(step=1, version=0, groups=tuple(made), advantages=np.linspace(-1, 1, count).astype(np.float32))
