from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.errors import RecordError
from headrace.records import Episode, Group, Task
from headrace.scoring.advantages import group_advantages, shuffle_rewards

TASK = Task(id="t", prompt="p")


def group(*rewards: float | None) -> Group:
    episodes = tuple(Episode(id=f"e{i}", task=TASK, reward=reward) for i, reward in enumerate(rewards))
    return Group(id="g", sequence=0, task=TASK, episodes=episodes)


def test_rewards_are_centred_on_their_own_group_and_divided_by_its_population_std() -> None:
    advantages = group_advantages([group(1.0, 0.0, 0.0, 0.0), group(2.0, 4.0)], normalise_std=True)
    std = math.sqrt(3 / 16)
    expected = [0.75 / (std + 1e-6), *[-0.25 / (std + 1e-6)] * 3, -1 / (1 + 1e-6), 1 / (1 + 1e-6)]
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_without_normalisation_rewards_are_only_centred() -> None:
    np.testing.assert_array_equal(group_advantages([group(1.0, 0.0), group(3.0)], False), [0.5, -0.5, 0.0])


@pytest.mark.parametrize("normalise_std", [True, False])
def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to(normalise_std: bool) -> None:
    assert np.mean([0.1] * 3) != 0.1
    np.testing.assert_array_equal(group_advantages([group(0.1, 0.1, 0.1)], normalise_std), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_a_reward_that_is_no_finite_number_is_refused_by_the_episodes_name(reward: float | None) -> None:
    with pytest.raises(RecordError, match="'e1'"):
        group_advantages([group(0.0, reward)], True)


def test_no_groups_give_no_advantages() -> None:
    assert group_advantages([], True).shape == (0,)


def test_shuffled_rewards_are_the_same_rewards_given_to_other_episodes_of_the_batch() -> None:
    groups = [group(0.0, 1.0, 2.0), group(3.0, 4.0)]
    shuffled = shuffle_rewards(groups, seed=0)
    rewards = [[episode.reward for episode in one.episodes] for one in shuffled]
    assert [len(one) for one in rewards] == [3, 2]
    assert sorted(r for one in rewards for r in one) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert rewards != [[0.0, 1.0, 2.0], [3.0, 4.0]]
    again = shuffle_rewards(groups, seed=0)
    assert rewards == [[episode.reward for episode in one.episodes] for one in again]
    assert [episode.id for one in shuffled for episode in one.episodes] == ["e0", "e1", "e2", "e0", "e1"]
