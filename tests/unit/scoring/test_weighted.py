"""Several scorers as one. Expected numbers by hand."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from headrace.bounds import SystemFailure
from headrace.config.dump import dump_config
from headrace.config.load import read_config
from headrace.errors import ConfigError, EpisodeFailure
from headrace.records import Task
from headrace.scoring.base import Attempt, AttemptTurn, Score
from headrace.scoring.config import RewardConfig, ScorerConfig
from headrace.scoring.weighted import Part, WeightedSum, open_scorer

TASK = Task(id="t", prompt="p", answer="four")
ATTEMPT = Attempt(turns=[AttemptTurn(prompt="p", text="four", tokens=[1, 2, 3], stop="end")])


def right(task: Task, attempt: Attempt) -> float:
    return float(attempt.text == task.answer)


async def length(task: Task, attempt: Attempt, unit: float = 1.0) -> Score:
    tokens = len(attempt.turns[-1].tokens)
    return Score(tokens * unit, {"tokens": float(tokens)})


def fails(task: Task, attempt: Attempt) -> float:
    raise ValueError("no verdict")


def refuses(task: Task, attempt: Attempt) -> float:
    raise EpisodeFailure("unreadable", "too dark")


NO_NUMBER = (
    "a reward is a number of at most ±1e+12 (got nan); look for a division by zero or a mistake in its scale"
)


def not_a_number(task: Task, attempt: Attempt) -> float:
    return math.nan


def score(*parts: tuple[str, float, Any]) -> Score:
    return asyncio.run(WeightedSum([Part(*part) for part in parts]).score(TASK, ATTEMPT))


def test_the_reward_is_the_weighted_sum_and_each_scorers_own_is_kept() -> None:
    found = score(("right", 2.0, right), ("length", -0.25, length))
    assert found.reward == 2.0 * 1.0 - 0.25 * 3.0
    assert found.metrics == {"reward/right": 1.0, "reward/length": 3.0, "length/tokens": 3.0}


def test_a_scorer_of_weight_0_is_a_metric_alone() -> None:
    found = score(("right", 1.0, right), ("length", 0.0, length))
    assert found.reward == 1.0
    assert found.metrics["reward/length"] == 3.0


@pytest.mark.parametrize(
    ("broken", "kind", "reason", "detail"),
    [
        (fails, SystemFailure, "scorer_error", "bad: ValueError: no verdict"),
        (refuses, EpisodeFailure, "unreadable", "bad: too dark"),
        (
            not_a_number,
            SystemFailure,
            "bad_reward",
            f"bad: {NO_NUMBER}",
        ),
    ],
)
def test_where_one_fails_the_episode_fails_with_its_name(broken: Any, kind: type, reason: str, detail: str) -> None:
    with pytest.raises(EpisodeFailure) as caught:
        score(("right", 1.0, right), ("bad", 1.0, broken))
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.detail) == (reason, detail)


def test_the_configurations_scorers_get_their_own_options() -> None:
    here = f"{Path(__file__)}"
    config = ScorerConfig(
        rewards=(
            RewardConfig(source="headrace.scoring.rules:ExactMatch", weight=0.5, options={"pattern": "f(.*)r"}),
            RewardConfig(source=f"{here}:length", name="short", weight=-1.0, options={"unit": 0.1}),
        )
    )
    found = asyncio.run(open_scorer(config)(TASK, ATTEMPT))
    assert found.metrics == pytest.approx({"reward/ExactMatch": 0.0, "reward/short": 0.3, "short/tokens": 3.0})
    assert found.reward == pytest.approx(-0.3)


TOML = """
model.path = "m"
tasks = {type = "jsonl", path = "t"}
[[scorer.rewards]]
source = "a.py:right"
weight = 2
[[scorer.rewards]]
source = "b.py:Judge.score"
name = "judge"
options = {url = "http://127.0.0.1"}
"""


def test_they_are_written_as_an_array_of_tables_and_dumped_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(TOML)
    config = read_config(tmp_path / "c.toml")
    one, other = config.scorer.rewards
    assert (one.called, one.weight, one.options) == ("right", 2.0, {})
    assert (other.called, other.weight, other.options) == ("judge", 1.0, {"url": "http://127.0.0.1"})
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert read_config(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ('name = "judge"', 'name = "right"', "scorer.rewards have different names"),
        ('name = "judge"', 'name = "a judge"', "the name of one of scorer.rewards is at most 40 letters"),
        ("weight = 2", "weight = inf", "scorer.rewards[0].weight is a finite number"),
        (
            "b.py:Judge.score",
            "judge",
            'a source of scorer.rewards names a scorer as "module:Name" or "file.py:Name"',
        ),
        ("[[scorer.rewards]]", '[scorer]\nsource = "a:b"\n[[scorer.rewards]]', "an episode's reward is made by"),
        ("weight = 2", "wieght = 2", "weight"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, before: str, after: str, rule: str) -> None:
    (tmp_path / "c.toml").write_text(TOML.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "c.toml")
    assert rule in str(caught.value)
