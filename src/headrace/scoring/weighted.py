"""Several scorers as one: their rewards multiplied by weights and added up. Runs in a scorer's worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.bounds import SystemFailure, described
from headrace.errors import EpisodeFailure
from headrace.records import Task
from headrace.references import made, resolve
from headrace.scoring.base import Attempt, Score
from headrace.scoring.config import ScorerConfig
from headrace.scoring.reward import reward_of
from headrace.workers import call_user, first_failure

ScoreFunction = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """One of several scorers: `score` is a function, or a coroutine function, of a task and an attempt."""

    name: str
    weight: float
    score: ScoreFunction


class WeightedSum:
    """A scorer of several. They are called one after another, in their order.

    The rewards that they gave are kept as the metrics reward/NAME, what else they keep as NAME/METRIC. Where one
    fails the episode fails, and its name begins the detail.
    """

    def __init__(self, parts: Sequence[Part]):
        self._parts = tuple(parts)

    async def score(self, task: Task, attempt: Attempt) -> Score:
        rewards: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for part in self._parts:
            try:
                found = await scored(part.score, task, attempt)
                metrics |= {f"{part.name}/{name}": value for name, value in found.metrics.items()}
            except Exception as error:
                raise _by(part.name, error) from error
            rewards[part.name] = found.reward
        total = weighted_sum({part.name: part.weight for part in self._parts}, rewards)
        return Score(total, metrics | {metric_of(name): reward for name, reward in rewards.items()})


def metric_of(name: str) -> str:
    """The episode's metric that has the reward which the scorer `name` gave."""
    return f"reward/{name}"


def weighted_sum(weights: Mapping[str, float], rewards: Mapping[str, float]) -> float:
    """Added up in the order of `weights`."""
    return sum((weight * rewards[name] for name, weight in weights.items()), 0.0)


async def scored(score: ScoreFunction, task: Task, attempt: Attempt) -> Score:
    """What a scorer gives. Raises SystemFailure for a reward that is no reward."""
    result = await call_user(score, task, attempt)
    found = result if isinstance(result, Score) else Score(result)
    return Score(reward_of(found.reward), found.metrics)


def open_scorer(config: ScorerConfig) -> ScoreFunction:
    """The function that the configuration names: of a class, an object's method."""
    if not config.rewards:
        return _opened(config.source, config.options)
    parts = [Part(one.called, one.weight, _opened(one.source, one.options)) for one in config.rewards]
    return WeightedSum(parts).score


def _opened(source: str, options: Mapping[str, Any]) -> ScoreFunction:
    found: Any = resolve(source)
    if inspect.isclass(found):
        method: ScoreFunction = made(found, options, source, "scorer").score
        return method
    function: ScoreFunction = partial(found, **options) if options else found
    return function


def _by(name: str, error: Exception) -> EpisodeFailure:
    """The same failure, with the scorer's name before its detail."""
    cause = first_failure(error)
    if cause is None:
        return SystemFailure("scorer_error", f"{name}: {described(error)}")
    kind = SystemFailure if isinstance(cause, SystemFailure) else EpisodeFailure
    return kind(cause.reason, f"{name}: {cause.detail}")
