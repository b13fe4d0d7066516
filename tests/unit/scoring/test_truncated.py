"""Episodes that were cut: what they are compared with, and what is compared with them. Expected numbers by hand."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest

from headrace.records import Episode, Group, Task, Turn
from headrace.scoring.advantages import advantages, is_truncated

TASK = Task(id="t", prompt="p")
Stop = Literal["stop", "length", "cancelled"]


def turn(stop: Stop, tokens: int = 2) -> Turn:
    return Turn(
        context=np.zeros(1, np.int32),
        tokens=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
        stop=stop,
    )


def group(*members: tuple[float, Stop]) -> Group:
    episodes = tuple(
        Episode(id=f"e{i}", task=TASK, turns=(turn(stop),), reward=reward)
        for i, (reward, stop) in enumerate(members)
    )
    return Group(id="g", sequence=0, task=TASK, episodes=episodes)


CUT = group((1.0, "stop"), (0.0, "stop"), (0.5, "stop"), (-3.0, "length"))


def test_by_default_a_truncated_episode_is_compared_as_any_other() -> None:
    np.testing.assert_allclose(
        advantages([CUT], scale="none"), [1.375, 0.375, 0.875, -2.625], rtol=1e-6
    )  # mean −0.375


def test_an_excluded_episode_has_advantage_0_and_is_in_nobodys_baseline() -> None:
    std = math.sqrt((0.25 + 0.25) / 3)
    found = advantages([CUT], truncated="exclude", dtype=np.float64)
    np.testing.assert_allclose(found, [0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0.0, 0.0], rtol=1e-12)
    # The mean of the others: of two others, not three.
    found = advantages([CUT], baseline="others", scale="none", truncated="exclude", dtype=np.float64)
    np.testing.assert_allclose(found, [0.75, -0.75, 0.0, 0.0], rtol=1e-12)


def test_an_episode_that_is_baseline_only_has_advantage_0_and_its_reward_counts_for_the_others() -> None:
    found = advantages([CUT], scale="none", truncated="baseline_only", dtype=np.float64)
    np.testing.assert_allclose(found, [1.375, 0.375, 0.875, 0.0], rtol=1e-12)


def test_over_the_batch_an_excluded_reward_is_in_neither_mean_nor_deviation() -> None:
    other = group((2.0, "stop"), (9.0, "length"))
    std = math.sqrt(np.var([1.0, 0.0, 0.5, 2.0]))
    found = advantages([CUT, other], baseline="none", scale="batch", truncated="exclude", dtype=np.float64)
    expected = [(r - 0.875) / (std + 1e-6) for r in (1.0, 0.0, 0.5)] + [0.0, (2.0 - 0.875) / (std + 1e-6), 0.0]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("truncated", ["exclude", "baseline_only"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("over", ["episodes", "tokens"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_a_group_that_was_cut_whole_gives_zeros(truncated, scale, over, unbiased) -> None:
    all_cut = group((1.0, "length"), (0.0, "length"))
    found = advantages([all_cut], scale=scale, over=over, truncated=truncated, unbiased=unbiased)
    np.testing.assert_array_equal(found, [0.0, 0.0])


def test_an_episode_is_truncated_when_its_last_turn_was_cut() -> None:
    def of(*stops: Stop) -> Episode:
        return Episode(id="e", task=TASK, turns=tuple(turn(stop) for stop in stops))

    assert is_truncated(of("stop", "length"))
    assert not is_truncated(of("length", "stop"))
    assert not is_truncated(of("stop"))
    assert not is_truncated(of())
