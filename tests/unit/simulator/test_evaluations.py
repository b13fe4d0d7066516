"""Evaluations in simulated runs: which version is the best, sets with names, and crashes in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outcome_builders import violations

from headrace.config.evaluation import EvaluationConfig, EvaluationSetConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.pipeline import Parts
from headrace.records import Episode, Task
from headrace.rollout.config import JsonlTasks, PythonTasks
from headrace.simulator.engine import SimEngine
from headrace.simulator.run import Outcome, simulate
from headrace.simulator.world import Costs
from headrace.training.config import TrainingConfig

GIVEN = JsonlTasks(path="given by hand")
Judge = Callable[[int, str], float | None]
"""Reward of an attempt, from the version and the set; None where the scorer fails."""


def run(
    judge: Judge, evaluation: EvaluationConfig, crashes: Sequence[float] = ()
) -> tuple[Outcome, list[dict[str, Any]], list[tuple[str, bool]]]:
    """The outcome, its evaluations, and what was made of each candidate."""
    config = RunConfig(
        model=ModelConfig(path=""),
        tasks=PythonTasks(source="a:b"),
        evaluation=evaluation,
        training=TrainingConfig(steps=6, groups_per_batch=2, group_size=4, checkpoint_every=2),
    )
    chosen: list[tuple[str, bool]] = []

    def tamper(parts: Parts) -> None:
        parts.evaluator = SimEngine(parts.engines.members[0]._world, "engine-eval")
        parts.eval_tasks = {
            name: [Task(id=f"{name}{i}", prompt="") for i in range(4)] for name in evaluation.by_name
        }
        score = parts.scorers.score

        async def scored(episode: Episode) -> Episode:
            if not episode.id.startswith("eval/"):
                return await score(episode)
            name = episode.id.split("/")[1] if episode.id.count("/") == 3 else "held_out"
            reward = judge(episode.version_max or 0, name)
            return episode.with_(failure="scorer_error") if reward is None else episode.with_(reward=reward)

        async def choose(candidate: str, best: bool) -> None:
            chosen.append((candidate, best))

        parts.scorers.score = scored
        parts.vault.choose = choose

    outcome = simulate(config, Costs(), seed=1, tamper=tamper, crashes=crashes)
    assert violations(outcome) == []
    return outcome, [event for event in outcome.world.events if event["kind"] == "evaluated"], chosen


def test_an_invalid_evaluation_is_never_the_best() -> None:
    """Ever better, but at step 2 the scorer fails, and before training it always does."""
    _, lines, chosen = run(
        lambda version, _: None if version in (0, 4) else float(version), EvaluationConfig(every=2, tasks=GIVEN)
    )
    assert [(line["step"], line["pass_1"], line["valid"], line["best"]) for line in lines] == [
        (0, None, False, False),
        (2, 2.0, True, True),
        (4, None, False, False),
        (6, 6.0, True, True),
    ]
    assert chosen == [("candidate-0", False), ("candidate-2", True), ("candidate-4", False), ("candidate-6", True)]


def test_the_named_set_chooses_the_best_and_all_are_told_of() -> None:
    evaluation = EvaluationConfig(
        every=3, tasks=GIVEN, sets={"hard": EvaluationSetConfig(tasks=GIVEN, samples=2)}, best="hard"
    )
    _, lines, chosen = run(lambda version, name: -version / 2 if name == "hard" else version / 1, evaluation)
    assert [best for _, best in chosen] == [True, False, False]
    assert [(line["set"], line["pass_1"], line["samples"]) for line in lines] == [
        ("hard", 0.0, 2),
        ("hard", -1.5, 2),
        ("hard", -3.0, 2),
    ]
    assert [line["sets"]["held_out"]["pass_1"] for line in lines] == [0.0, 3.0, 6.0]


def test_a_run_that_crashed_has_the_evaluations_of_before_and_none_twice() -> None:
    outcome, lines, _ = run(lambda version, _: 1.0, EvaluationConfig(every=2, tasks=GIVEN), crashes=[4.0])
    assert outcome.lives == 2
    state = outcome.world.checkpoints[-1][0]
    assert [line["step"] for line in state["evaluations"]] == [0, 2, 4, 6]
    without = [{key: line[key] for key in line if key not in ("kind", "time", "best")} for line in lines]
    assert all(line in without for line in state["evaluations"])
