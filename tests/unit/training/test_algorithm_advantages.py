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
from headrace.training.config import TrainingConfig

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
    {"type": "grpo", "unbiased_std": True, "std_eps": 1e-4},
    {"type": "dapo", "unbiased_std": True, "std_eps": 1e-2},
    {"type": "gspo", "unbiased_std": True},
    {"type": "reinforce++", "unbiased_std": True, "std_eps": 1e-8},
    {"type": "reinforce++", "whiten": "tokens"},
    {"type": "reinforce++", "whiten": "tokens", "group_baseline": False, "unbiased_std": True},
    {"type": "ppo", "whiten": "tokens"},
    {"type": "ppo", "unbiased_std": True, "std_eps": 1e-3},
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
        how = TrainingConfig(algorithm=algorithm).comparison
        found = advantages(groups, **how._asdict(), dtype=dtype)
        plain = [[float(reward) for reward in group] for group in rewards]
        expected = reference.advantages(msgspec.to_builtins(algorithm), plain, lengths)
        assert found.dtype == dtype
        # What is left where large numbers cancel is their rounding.
        largest = max(map(abs, expected), default=0.0)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * largest)
        if how.baseline != "none" and how.overlong is None and how.over == "episodes":
            equal = np.repeat([min(group) == max(group) for group in plain], sizes)
            assert not found[equal].any()


def two_groups() -> list[Group]:
    """A right answer and a wrong one that is three times as long; then two wrong ones and two right ones."""
    plan = [[(1.0, 2), (0.0, 6)], [(0.0, 6), (0.0, 6), (1.0, 2), (1.0, 2)]]
    return [Group(id="g", sequence=0, task=TASK, episodes=tuple(episode(r, n) for r, n in group)) for group in plan]


def test_whitening_over_tokens_by_hand() -> None:
    """Right answers have 6 tokens, wrong ones 18: a mean of 1/4 and a deviation of √3 / 4."""
    config = TrainingConfig(algorithm=msgspec.convert({"type": "ppo", "whiten": "tokens"}, Algorithm))
    found = advantages(two_groups(), **config.comparison._asdict(), dtype=np.float64)
    right, wrong = 0.75 / (3**0.5 / 4 + 1e-6), -0.25 / (3**0.5 / 4 + 1e-6)
    np.testing.assert_allclose(found, [right, wrong, wrong, wrong, right, right], rtol=1e-12)
    # Over tokens the sum is 0; over episodes it is that of the episodes.
    assert sum(found * [2, 6, 6, 6, 2, 2]) == pytest.approx(0, abs=1e-12)


def test_a_group_of_equal_rewards_teaches_when_tokens_are_whitened() -> None:
    """Centred: 1/2 on 2 tokens, −1/2 on 6, and 0 on 4 of the group of equal rewards. Mean −2/12 = −1/6."""
    groups = [
        Group(id="g", sequence=0, task=TASK, episodes=(episode(1.0, 2), episode(0.0, 6))),
        Group(id="h", sequence=1, task=TASK, episodes=(episode(1.0, 1), episode(1.0, 3))),
    ]
    config = TrainingConfig(algorithm=msgspec.convert({"type": "reinforce++", "whiten": "tokens"}, Algorithm))
    found = advantages(groups, **config.comparison._asdict(), dtype=np.float64)
    deviation = ((2 * (2 / 3) ** 2 + 6 * (1 / 3) ** 2 + 4 * (1 / 6) ** 2) / 12) ** 0.5
    expected = np.array([2 / 3, -1 / 3, 1 / 6, 1 / 6]) / (deviation + 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(("size", "ratio"), [(8, (8 / 7) ** 0.5), (2, 2**0.5)])
def test_the_sample_deviation_makes_advantages_smaller_by_the_root_of_n_over_n_less_1(
    size: int, ratio: float
) -> None:
    group = Group(
        id="g", sequence=0, task=TASK, episodes=tuple(episode(float(i < size // 2), 1) for i in range(size))
    )
    own, trl = (advantages([group], unbiased=unbiased, eps=1e-12, dtype=np.float64) for unbiased in (False, True))
    np.testing.assert_allclose(own / trl, ratio, rtol=1e-9)
