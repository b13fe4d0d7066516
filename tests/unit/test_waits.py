"""Whose idle seconds are whose fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.buffer.config import BufferConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.pipeline import Parts
from headrace.records import Batch, Episode
from headrace.rollout.config import PythonTasks
from headrace.simulator.run import simulate
from headrace.simulator.world import Costs
from headrace.training.base import StepReport
from headrace.training.config import TrainingConfig
from headrace.usage import Usage
from headrace.waits import (
    ENGINE_CAUSES,
    TRAINER_CAUSES,
    Around,
    Sight,
    TimeSpent,
    Waited,
    Waits,
    engines_wait_for,
    idle_shares,
    trainer_waits_for,
)

# ── What a sight means ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sight", "trainer", "engines"),
    [
        (Sight("training", generating=3), None, "training"),
        (Sight("training", generating=3, full=True), None, "environment"),
        (Sight("training", all_begun=True, without_request=1), None, "end"),
        (Sight("training", generating=3, asleep=True, full=True), None, "training"),
        (Sight("batch", generating=3, scoring=2), "generation", "environment"),
        (Sight("batch", generating=3, scoring=2, only_scoring=True), "scoring", "environment"),
        (Sight("batch", generating=3, scoring=2, without_request=1), "environment", "environment"),
        (Sight("batch", scoring=2, without_request=1), "scoring", "scoring"),
        (Sight("batch", publishing=True, without_request=1), "publication", "publication"),
        (Sight("batch", without_request=1), "controller", "controller"),
        (Sight("batch", generating=3, engines=2, without_request=1), "generation", "environment"),
        (Sight("publication", without_request=1), "publication", "publication"),
        (Sight("evaluation", without_request=1), "evaluation", "evaluation"),
        (Sight("turns", generating=3, asleep=True), "turns", "turns"),
        (Sight("controller", without_request=1), "controller", "controller"),
    ],
)
def test_what_the_controller_sees_has_one_cause_for_each_side(
    sight: Sight, trainer: str | None, engines: str
) -> None:
    assert trainer_waits_for(sight) == trainer
    assert engines_wait_for(sight) == engines


# ── A schedule by hand ───────────────────────────────────────────────────────────────────────────────────


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def causes(**seconds: float) -> Callable[[tuple[str, ...]], dict[str, float]]:
    return lambda names: dict.fromkeys(names, 0.0) | seconds


def test_seconds_are_added_up_by_the_cause_there_was_meanwhile() -> None:
    clock = Clock()
    waits = Waits(clock, most_generating=8)
    empty = 2
    waits.look_around = lambda: Around(engines=2, without_request=empty)
    with waits.doing("batch"):
        waits.generates(1)
        clock.now += 1  # both engines wait for the environment, and the trainer does
        empty = 1
        waits.look()
        clock.now += 2  # the trainer waits for generation; one engine has no request
        empty = 2
        waits.look()
        waits.generates(-1)
        waits.scores(1)
        clock.now += 4
        waits.scores(-1)
    with waits.doing("training"):
        waits.scores(1)
        clock.now += 8  # engines wait for the trainer, which works while an episode is scored
        waits.asleep(True)
        clock.now += 16
        waits.scores(-1)
    waits.asleep(False)
    clock.now += 32
    waited = waits.waited()
    assert waited.trainer == causes(environment=1, generation=2, scoring=4, controller=32)(TRAINER_CAUSES)
    assert waited.engines == causes(environment=4, scoring=8, training=48, controller=64)(ENGINE_CAUSES)
    assert waited.together_s == 8
    clock.now += 1
    assert waits.waited().since(waited).trainer == causes(controller=1)(TRAINER_CAUSES)


def test_the_trainer_waits_for_scoring_from_when_the_batch_lacks_only_groups_that_are_scored() -> None:
    clock = Clock()
    waits = Waits(clock, most_generating=8)
    ready = 0
    waits.only_scoring = lambda: ready < 2 <= ready + waits.groups_only_scored
    waits.look_around = lambda: Around(only_scoring=waits.only_scoring())
    waits.generates(1)
    waits.scores(1)
    with waits.doing("batch"):
        clock.now += 1
        waits.group_generated()
        clock.now += 2
        waits.group_generated()
        clock.now += 4  # both groups of the batch are with the scorer, while a third is generated
        waits.group_scored()
        ready += 1
        waits.look_at_groups()
        clock.now += 8
        waits.group_scored()
        ready += 1
        waits.look_at_groups()
    assert waits.waited().trainer == causes(generation=3, scoring=12)(TRAINER_CAUSES)


def test_shares_add_up_to_what_the_component_measured_and_the_rest_is_the_controllers() -> None:
    waited = {"generation": 2.0, "scoring": 1.0, "controller": 0.5}
    assert idle_shares(4.0, 10.0, waited) == pytest.approx({"generation": 0.2, "scoring": 0.1, "controller": 0.1})
    # The clocks are read at different moments: never more than was measured.
    assert idle_shares(1.75, 10.0, waited) == pytest.approx(
        {"generation": 0.1, "scoring": 0.05, "controller": 0.025}
    )
    assert idle_shares(0.0, 0.0, waited) == {"generation": 0, "scoring": 0, "controller": 0}


def test_a_lines_keys_name_the_side_and_the_cause() -> None:
    spent = TimeSpent(
        at=10.0,
        engines=Usage(busy_s=12, idle_s=8),
        trainer=Usage(busy_s=4, idle_s=5, overhead_s=1),
        waited=Waited(causes(generation=5)(TRAINER_CAUSES), causes(training=6)(ENGINE_CAUSES), 3.0),
        controller_s=2.5,
    )
    line = spent.idle_metrics()
    assert {key: share for key, share in line.items() if share} == pytest.approx(
        {
            "trainer_idle_generation_frac": 0.5,
            "engine_idle_training_frac": 0.3,
            "engine_idle_controller_frac": 0.1,
            "together_frac": 0.3,
            "controller_busy_frac": 0.25,
        }
    )
    assert len(line) == len(TRAINER_CAUSES) + len(ENGINE_CAUSES) + 2


# ── The pipeline in virtual time ─────────────────────────────────────────────────────────────────────────


def lines_of(
    *, score_s: float, step_s: float, token_s: float = 1e-4, max_staleness: int = 0
) -> list[dict[str, Any]]:
    """Six steps; every scoring and every training step takes exactly so long, all else next to nothing."""
    lines: list[dict[str, Any]] = []

    def exactly(parts: Parts) -> None:
        train, score = parts.trainer.train, parts.scorers.score

        async def step(batch: Batch) -> StepReport:
            await asyncio.sleep(step_s)
            parts.trainer._busy_s += step_s  # type: ignore[attr-defined]
            return await train(batch)

        async def scored(episode: Episode) -> Episode:
            await asyncio.sleep(score_s)
            return await score(episode)

        parts.trainer.train, parts.scorers.score = step, scored  # type: ignore[method-assign]
        parts.telemetry.step = lines.append  # type: ignore[method-assign]

    config = RunConfig(
        model=ModelConfig(path=""),
        tasks=PythonTasks(source="a:b"),
        buffer=BufferConfig(type="bounded", max_staleness=max_staleness),
        training=TrainingConfig(steps=6, groups_per_batch=2, group_size=2),
    )
    none = 1e-5
    costs = Costs(token_s=token_s, score_s=none, step_s=none, stage_s=none, commit_s=none, save_s=none)
    assert simulate(config, costs, seed=1, tamper=exactly).finished
    return lines


def test_taking_turns_with_a_slow_scorer_both_sides_wait_for_it_and_engines_for_the_trainer() -> None:
    line = lines_of(score_s=3.0, step_s=1.0)[-2]
    assert line["trainer_idle_scoring_frac"] == pytest.approx(0.75, abs=0.02)
    assert line["trainer_idle_frac"] == pytest.approx(0.75, abs=0.02)
    assert line["engine_idle_scoring_frac"] == pytest.approx(0.75, abs=0.02)
    assert line["engine_idle_training_frac"] == pytest.approx(0.25, abs=0.02)
    assert line["together_frac"] == pytest.approx(0, abs=0.02)


def test_a_slow_trainer_is_what_engines_wait_for_and_it_never_waits() -> None:
    line = lines_of(score_s=1e-5, step_s=5.0, max_staleness=2)[2]
    assert line["trainer_idle_frac"] == pytest.approx(0, abs=0.02)
    assert line["engine_idle_training_frac"] == pytest.approx(1, abs=0.02)


def test_when_generation_is_slow_the_trainer_waits_for_it_and_works_beside_it() -> None:
    line = lines_of(score_s=1e-5, step_s=0.1, token_s=1.0, max_staleness=2)[2]
    assert line["trainer_idle_generation_frac"] > 0.9
    assert line["engine_idle_frac"] < 0.05
    assert 0 < line["together_frac"] < 0.1


def test_engines_that_have_sampled_all_there_is_to_train_on_wait_for_the_end() -> None:
    line = lines_of(score_s=1e-5, step_s=5.0, max_staleness=2)[-1]
    assert line["engine_idle_end_frac"] == pytest.approx(1, abs=0.02)
