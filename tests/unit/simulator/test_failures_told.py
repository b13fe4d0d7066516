"""A run in which episodes fail tells of it in its events and metrics, and has users' metrics in its lines."""

from __future__ import annotations

from typing import Any

import pytest
from outcome_builders import evidence, violations

from headrace.audit import check_evidence
from headrace.audit.findings import Findings
from headrace.config.run import ModelConfig, RunConfig
from headrace.errors import GaveUp
from headrace.pipeline import Parts
from headrace.rollout.config import PythonTasks
from headrace.simulator.run import Outcome, simulate
from headrace.simulator.world import Costs
from headrace.training.config import TrainingConfig

CONFIG = RunConfig(
    model=ModelConfig(path=""),
    tasks=PythonTasks(source="a:b"),
    training=TrainingConfig(steps=6, groups_per_batch=2, group_size=4, min_group=2),
)


def run(costs: Costs, measure: bool = False) -> tuple[Outcome, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []

    def tamper(parts: Parts) -> None:
        parts.telemetry.step = lines.append
        score = parts.scorers.score

        async def measured(episode):
            episode = await score(episode)
            place = int(episode.id.rsplit("/", 1)[-1]) if "/" in episode.id else 0
            return episode.with_(
                metrics={"length": float(episode.num_tokens), **({"odd": 1.0} if place % 2 else {})}
            )

        if measure:
            parts.scorers.score = measured

    return simulate(CONFIG, costs, seed=3, tamper=tamper), lines


def test_failures_are_in_the_metrics_and_an_alarm_comes_before_the_first_step() -> None:
    outcome, lines = run(Costs(scorer_failure=0.5))
    assert violations(outcome) == []
    [first, *_] = [event for event in outcome.world.events if event["kind"] == "alarm"]
    assert (first["step"], first["metric"], first["commonest"], first["on"]) == (
        0,
        "failed_frac",
        "scorer_error",
        True,
    )
    assert first["example"] == "simulated"
    shares = [line["failed_frac"] for line in lines if line["failed_frac"] is not None]
    assert 0.15 < sum(shares) / len(shares) < 0.6
    _, healthy = run(Costs())
    assert {line["failed_frac"] for line in healthy} <= {0.0, None}


def test_a_run_in_which_all_fails_tells_it_long_before_it_gives_up() -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    def tamper(parts: Parts) -> None:
        parts.telemetry.event = lambda kind, **fields: events.append((kind, fields))

    with pytest.raises(GaveUp):
        simulate(CONFIG, Costs(scorer_failure=1.0), seed=1, tamper=tamper)
    kinds = [kind for kind, _ in events]
    assert kinds.index("alarm") < 30
    assert kinds.count("alarm") == 1


def test_users_metrics_are_means_over_the_steps_episodes_that_have_them() -> None:
    outcome, lines = run(Costs(), measure=True)
    for (batch, _), line in zip(outcome.world.batches, lines, strict=True):
        lengths = [episode.num_tokens for episode in batch.episodes]
        assert line["user/length"] == pytest.approx(sum(lengths) / len(lengths))
        assert line.get("user/odd") in (1.0, None)


def test_the_audit_computes_users_metrics_again() -> None:
    outcome, lines = run(Costs(), measure=True)
    assert audited(outcome, lines) == []
    assert audited(outcome, [{**lines[0], "user/length": lines[0]["user/length"] + 1}, *lines[1:]]) == [
        ("step 1", "user/length")
    ]
    assert audited(outcome, [{**lines[0], "user/mine": 1.0}, *lines[1:]]) == [("step 1", "user/mine")]
    without = {key: value for key, value in lines[2].items() if key != "user/length"}
    assert audited(outcome, [*lines[:2], without, *lines[3:]]) == [("step 3", "user/length")]


def audited(outcome: Outcome, lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where a user's metric is wrong, and which. Of the others simulated trainers tell little."""
    found, records = Findings(), evidence(outcome)
    records.metrics = lambda: iter(lines)
    check_evidence(records, found)
    return [
        (one.where, next(w for w in one.what.split() if w.startswith("user/")).rstrip(":"))
        for one in found.violations
        if "user/" in one.what
    ]
