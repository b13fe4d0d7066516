"""Each algorithm's advantages, as a run computes them, against `loss_reference`."""

from __future__ import annotations

from typing import Any

import loss_reference as reference
import msgspec
import numpy as np
import pytest

from headrace.records import Episode, Group, Sampling, Task, Turn
from headrace.scoring.advantages import advantages
from headrace.training.algorithms import Algorithm

ALGORITHMS: list[dict[str, Any]] = [
    {"type": "grpo"},
    {"type": "grpo", "normalise_std": False},
    {"type": "dr_grpo"},
    {"type": "rloo"},
    {"type": "reinforce++"},
    {"type": "reinforce++", "group_baseline": False},
    {"type": "dapo"},
    {"type": "dapo", "overlong_limit": 12, "overlong_buffer": 5, "overlong_penalty": 0.5},
    {"type": "gspo"},
    {"type": "ppo"},
]
TASK = Task(id="t", prompt="p")


def episode(reward: float, length: int) -> Episode:
    turn = Turn(
        context=np.zeros(1, np.int32),
        tokens=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        stop="end",
        sampling=Sampling(),
    )
    return Episode(id="e", task=TASK, turns=(turn,), reward=reward)


USUAL, EXTREME = (0.0, 0.1, 1.0), (-1e12, -3.0, 1e-9, 0.0, 2e-9, 0.7, 1e12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-5)])
@pytest.mark.parametrize("values", [USUAL, EXTREME])
@pytest.mark.parametrize("given", ALGORITHMS)
def test_they_are_the_reference_s(
    given: dict[str, Any], values: tuple[float, ...], dtype, tolerance: float
) -> None:
    algorithm = msgspec.convert(given, Algorithm)
    dice = np.random.default_rng(0)
    for _ in range(30):
        sizes = dice.integers(1, 7, int(dice.integers(1, 6)))
        rewards = [(dice.choice(values, size) if dice.random() < 0.8 else [0.1] * size) for size in sizes]
        lengths = [dice.integers(0, 16, size).tolist() for size in sizes]
        groups = [
            Group(
                id="g",
                sequence=0,
                task=TASK,
                episodes=tuple(episode(float(r), n) for r, n in zip(*pair, strict=True)),
            )
            for pair in zip(rewards, lengths, strict=True)
        ]
        how = algorithm.recipe
        found = advantages(groups, baseline=how.baseline, scale=how.scale, overlong=how.overlong, dtype=dtype)
        plain = [[float(reward) for reward in group] for group in rewards]
        expected = reference.advantages(msgspec.to_builtins(algorithm), plain, lengths)
        assert found.dtype == dtype
        # What is left where large numbers cancel is their rounding.
        largest = max(map(abs, expected), default=0.0)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * largest)
        if how.baseline != "none" and how.overlong is None:
            equal = np.repeat([min(group) == max(group) for group in plain], sizes)
            assert not found[equal].any()
