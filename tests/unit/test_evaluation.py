"""What an evaluation says: failures apart, pass@k, intervals, users' metrics, and what it is called."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from headrace.config.evaluation import EvaluationConfig, EvaluationSet
from headrace.errors import ConfigError
from headrace.evaluation import (
    Attempted,
    Evaluation,
    blames_policy,
    evaluate,
    evaluation_line,
    is_best,
    summarise,
)
from headrace.records import Episode, Task, Turn
from headrace.rollout.config import JsonlTasks, SamplingConfig
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.world import Costs, SimRollouts, World


def evaluated(score: Callable[[Episode], Episode], *, tasks: int, samples: int, **settings: float) -> Evaluation:
    """Of tasks whose rollouts all succeed."""

    class Scorers:
        async def score(self, episode: Episode) -> Episode:
            return score(episode)

    async def main() -> Evaluation:
        world = World(costs=Costs(), dice=random.Random(0))
        return await evaluate(
            [Task(id=str(i), prompt="") for i in range(tasks)],
            EvaluationSet(JsonlTasks(path="x"), tasks, samples, SamplingConfig(), **settings),
            rollouts=SimRollouts(world),
            scorers=Scorers(),
            engine=SimEngine(world, "engine"),
            seed=0,
            concurrency=2,
        )

    return run_virtual(main())


def attempt(reward: float | None, failure: str | None = None, detail: str = "", **metrics: float) -> Attempted:
    return Attempted(reward, failure, detail, tokens=10, metrics=metrics)


def of(*rows: Sequence[float | None]) -> Evaluation:
    """An evaluation of these rewards, a row for each task; None stands for a scorer's failure."""
    return summarise(
        [[attempt(r) if r is not None else attempt(None, "scorer_error") for r in row] for row in rows],
        max_failed=0.1,
    )


def test_a_scorers_failures_stand_apart_from_the_mean() -> None:
    """A scorer of ±1 that raises half the time: the mean is of what it scored."""

    def score(episode: Episode) -> Episode:
        place = int(episode.id.split("/")[1])
        if place % 2:
            return episode.with_(failure="scorer_error", detail="KeyError: 'answer'")
        return episode.with_(reward=1.0 if place == 0 else -1.0)

    result = evaluated(score, tasks=10, samples=1)
    assert result.pass_1 == pytest.approx(-0.6)
    assert (result.failed, result.failed_frac, result.valid) == (5, 0.5, False)
    assert result.failures == {"scorer_error": 5}
    assert result.failure_example == "scorer_error: KeyError: 'answer'"
    assert result.metric == "reward"


def test_an_evaluation_in_which_all_fails_has_no_number() -> None:
    result = evaluated(lambda e: e.with_(failure="scorer_error"), tasks=3, samples=2)
    assert (result.pass_1, result.pass_k, result.low95, result.length_mean) == (None, None, None, None)
    assert (result.failed, result.valid) == (6, False)


def test_it_is_valid_up_to_the_largest_share_of_failures() -> None:
    assert of(*[[1.0]] * 9, [None]).valid
    assert not of(*[[1.0]] * 8, [None], [None]).valid


@pytest.mark.parametrize(
    ("reason", "turns", "blamed"),
    [
        ("my_own_reason", 0, True),
        ("too_many_samples", 0, True),
        ("prompt_too_long", 1, True),
        ("prompt_too_long", 0, False),
        ("environment_error", 1, False),
        ("environment_timeout", 1, False),
        ("environment_crash", 1, False),
        ("bad_metrics", 1, False),
        ("engine_died", 0, False),
    ],
)
def test_a_policy_is_blamed_for_what_it_could_not_do_and_for_nothing_else(
    reason: str, turns: int, blamed: bool
) -> None:
    import numpy as np

    turn = Turn(*(np.zeros(1, np.int32),) * 4, stop="end")
    episode = Episode(id="e", task=Task(id="t", prompt=""), turns=(turn,) * turns, failure=reason)
    assert blames_policy(episode) is blamed


def test_what_the_policy_made_fail_counts_as_the_configured_reward() -> None:
    class Rollouts(SimRollouts):
        async def run(self, request):
            episode = await super().run(request)
            return episode.with_(failure="gave_up") if request.id == "eval/1/0" else episode

    class Scorers:
        async def score(self, episode: Episode) -> Episode:
            assert episode.failure is None
            return episode.with_(reward=1.0)

    async def main(failure_reward: float) -> Evaluation:
        world = World(costs=Costs(), dice=random.Random(0))
        return await evaluate(
            [Task(id=str(i), prompt="") for i in range(4)],
            EvaluationSet(JsonlTasks(path="x"), 4, 1, SamplingConfig(), failure_reward=failure_reward),
            rollouts=Rollouts(world),
            scorers=Scorers(),
            engine=SimEngine(world, "engine"),
            seed=0,
            concurrency=4,
        )

    result = run_virtual(main(0.0))
    assert (result.pass_1, result.failed, result.policy_failed, result.valid) == (0.75, 0, 1, True)
    assert (result.metric, result.failures) == ("accuracy", {"gave_up": 1})
    assert run_virtual(main(-1.0)).pass_1 == 0.5


def test_a_scorers_own_reason_is_never_the_policys() -> None:
    result = evaluated(lambda e: e.with_(failure="judge_is_down"), tasks=2, samples=1)
    assert (result.failed, result.policy_failed) == (2, 0)


def test_the_metric_is_an_accuracy_only_where_all_rewards_are_0_or_1() -> None:
    assert of([0.0, 1.0], [1.0, None]).metric == "accuracy"
    assert of([0.0, 1.0], [0.5]).metric == "reward"
    assert of([5.0], [-5.0]).metric == "reward"


def test_pass_at_k_is_the_unbiased_estimate_over_tasks() -> None:
    """Two right of four and one right of four. C(2,2)/C(4,2) = 1/6 and C(3,2)/C(4,2) = 3/6 choose no right one."""
    result = of([1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0])
    assert result.pass_at == pytest.approx({"1": 3 / 8, "2": (5 / 6 + 3 / 6) / 2, "4": 1.0})
    assert (result.pass_1, result.pass_k) == pytest.approx((3 / 8, 1.0))


def test_a_task_counts_for_the_ks_that_it_has_completions_for() -> None:
    result = of([1.0, None], [0.0, 0.0])
    assert result.pass_1 == pytest.approx(0.5)
    assert result.pass_k == pytest.approx(0.0)


def test_one_completion_a_task_has_wilsons_interval() -> None:
    """8 of 10, as statsmodels' proportion_confint(8, 10, method="wilson") has it."""
    result = of(*[[1.0]] * 8, *[[0.0]] * 2)
    assert (result.low95, result.high95) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert result.interval == "wilson"


def test_several_completions_a_task_have_the_interval_of_the_tasks_means() -> None:
    """Means 1, 0.5, 0.5, 0: mean 0.5, standard error sqrt(1/6)/2, t of 3 degrees of freedom 3.18245."""
    result = of([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0])
    reach = 3.18245 * (1 / 6) ** 0.5 / 2
    assert (result.low95, result.high95) == (max(0.0, 0.5 - reach), min(1.0, 0.5 + reach))
    partial = of([0.5, 0.3], [0.1, 0.1], [0.9, 0.9])
    assert partial.interval == "student"
    # Means 0.4, 0.1, 0.9: standard deviation 0.404145, t of 2 degrees 4.302653.
    assert partial.high95 == pytest.approx(1.4 / 3 + 4.302653 * 0.404145 / 3**0.5, rel=1e-5)


def test_tasks_that_all_came_out_alike_leave_doubt() -> None:
    """Three of three: Wilson's lower end is 1 / (1 + 1.96² / 3)."""
    result = of([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    assert result.low95 == pytest.approx(1 / (1 + 3.841459 / 3), rel=1e-5)
    assert result.high95 == pytest.approx(1.0)


def test_users_metrics_are_means_over_the_completions_that_have_them() -> None:
    result = summarise(
        [[attempt(1.0, right=1.0, steps=4.0), attempt(0.0, right=0.0)], [attempt(None, "scorer_error", right=9.0)]],
        max_failed=1.0,
    )
    assert result.user == {"right": 0.5, "steps": 4.0}


def test_rewards_stay_rewards_when_they_happen_to_be_0_and_1() -> None:
    before = [{"step": 0, "set": "held_out", **of([0.5]).as_dict()}]
    assert evaluation_line("held_out", of([1.0]), before)["metric"] == "reward"
    assert evaluation_line("other", of([1.0]), before)["metric"] == "accuracy"


def test_the_best_is_above_all_valid_evaluations_of_its_set() -> None:
    before = [
        {"set": "held_out", "pass_1": 0.5, "valid": True},
        {"set": "held_out", "pass_1": 0.9, "valid": False},
        {"set": "hard", "pass_1": 0.8, "valid": True},
        {"pass_1": 0.4},
    ]
    assert is_best(0.6, "held_out", before)
    assert not is_best(0.5, "held_out", before)
    assert not is_best(0.7, "hard", before)


def test_sets_take_what_they_do_not_say_from_all() -> None:
    hard = {"tasks": {"type": "jsonl", "path": "hard.jsonl"}, "samples": 4}
    import msgspec

    config = msgspec.convert(
        {"tasks": {"type": "jsonl", "path": "x"}, "limit": 7, "sets": {"hard": hard}}, EvaluationConfig
    )
    sets = config.by_name
    assert list(sets) == ["held_out", "hard"]
    assert [(one.limit, one.samples) for one in sets.values()] == [(7, 1), (7, 4)]
    assert list(msgspec.structs.replace(config, best="hard").by_name) == ["hard", "held_out"]
    assert list(msgspec.structs.replace(config, tasks=None).by_name) == ["hard"]
    with pytest.raises(ConfigError, match="names one of the sets"):
        msgspec.structs.replace(config, best="soft").check()
    with pytest.raises(ConfigError, match="is the name of"):
        msgspec.structs.replace(config, sets={"held_out": config.sets["hard"]}).check()
