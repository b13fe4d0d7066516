"""Forged runs of kinds that the other forgeries' runs are not: evaluated, with an adapter, taught by a former self.
All digests are computed again, so that what finds a forgery is another record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from audited_runs import PLAIN, make_project
from forging import (
    Apply,
    Line,
    execute,
    load,
    on_config,
    on_event,
    on_file,
    on_json,
    on_turns,
    reseal,
    save,
    together,
)
from outcomes import audited

from headrace.audit import run_audit

JUDGED = (
    PLAIN
    + """
[training.lora]
rank = 4
[training.distillation]
every = 3
rewards = true
[evaluation]
every = 4
tasks = {type = "python", source = "user.py:tasks", options = {count = 4}}
"""
)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    project = make_project(tmp_path_factory.mktemp("judged"), small_model, JUDGED)
    project.train()
    return project.run


def on_summary(**changes: Any) -> Apply:
    return on_json("summary.json", lambda summary: summary.update(changes))


def metrics(**changes: Any) -> Apply:
    """In every line."""

    def change(lines: list[Line]) -> None:
        for line in lines:
            line.update(changes)

    return on_file("metrics.jsonl", change)


def lineage(**changes: Any) -> Apply:
    return on_turns(lambda turn: [event.update(changes) for event in turn["lineage"]])


def other_teacher(run: Path) -> None:
    file = run / "episodes" / "step-000008.jsonl"
    lines = load(file)
    for line in lines:
        line["teacher"] += 1
        execute(run, "UPDATE episodes SET teacher = ? WHERE id = ?", line["teacher"], line["id"])
    save(file, lines)


def without_teacher(run: Path) -> None:
    for file in (run / "episodes").glob("step-*.jsonl"):
        save(file, [line | {"teacher": None} for line in load(file)])
    execute(run, "UPDATE episodes SET teacher = NULL")


def set_aside(run: Path) -> None:
    (run / "episodes" / "orphaned-1").mkdir()
    lines = load(run / "episodes" / "step-000012.jsonl")
    named = [line | {"id": f"g0009999/{place}", "group": "g0009999"} for place, line in enumerate(lines)]
    save(run / "episodes" / "orphaned-1" / "step-000013.jsonl", named)


def evaluated_later(run: Path) -> None:
    on_event("evaluated", lambda event: event.update(step=5), 1)(run)
    on_json("summary.json", lambda summary: summary["evaluations"][1].update(step=5))(run)


FORGERIES: dict[str, tuple[Apply, str]] = {
    "the result raised": (on_summary(eval_after=0.99), "it has eval_after 0.99, its evaluations"),
    "the result before training lowered": (on_summary(eval_before=0.0), "it has eval_before 0.0, its evaluations"),
    "an evaluation left out of the summary": (
        on_json("summary.json", lambda summary: summary["evaluations"].pop(1)),
        "it lacks the evaluation of step 4",
    ),
    "an evaluation twice in the summary": (
        on_json("summary.json", lambda summary: summary["evaluations"].insert(0, summary["evaluations"][0])),
        "it has an evaluation of step 0 that the events do not have",
    ),
    "more tasks evaluated, in the summary": (
        on_json("summary.json", lambda summary: summary["evaluations"][0].update(tasks=400)),
        "it lacks the evaluation of step 0",
    ),
    "an evaluation as of another step": (evaluated_later, "evaluated as of step 5, in the ledger of 4"),
    "a step's metrics after the last step": (
        on_file("metrics.jsonl", lambda lines: [*lines, lines[-1] | {"step": 13, "reward_mean": 1.0}]),
        "it has a line of step 13 after that of step 12",
    ),
    "the last step's metrics twice": (
        on_file("metrics.jsonl", lambda lines: [*lines, lines[-1] | {"reward_mean": 1.0}]),
        "it has a line of step 12 after that of step 12",
    ),
    "the staleness left out of the metrics": (metrics(staleness_max=None), "metrics.jsonl has staleness_max None"),
    "another spread of versions": (metrics(version_spread_max=7.0), "metrics.jsonl has version_spread_max 7.0"),
    "all tokens of the newest version": (metrics(lag_0_frac=1.0, lag_1_frac=0.0), "metrics.jsonl has lag_0_frac"),
    "other weights beneath the adapter": (lineage(base=7), "the lineage names the weights beneath an adapter"),
    "an unknown cause": (lineage(cause="magic"), "the lineage has a cause ['magic']"),
    "a cache neither kept nor recomputed": (lineage(before="magic"), "the lineage has a before ['magic']"),
    "an unknown stop": (on_turns(lambda turn: turn.update(stop="eos")), "it stopped for 'eos'"),
    "another teacher, in the ledger too": (other_teacher, "held against a teacher of version 4, and it was 3"),
    "no teacher, in the ledger too": (without_teacher, "held against a teacher of version None, and it was 0"),
    "a checkpoint invented in the events": (
        on_file("events.jsonl", lambda lines: lines.insert(-2, _checkpoint(lines) | {"version": 7, "step": 7})),
        "checkpointed at step 7 by the events, and the ledger has no such checkpoint",
    ),
    "checkpoints removed from the events": (
        on_file("events.jsonl", lambda lines: [line for line in lines if line["kind"] != "checkpoint"]),
        "checkpointed at step 3 in session 1, whose events do not tell of it",
    ),
    "a checkpoint invented in the ledger": (
        lambda run: execute(run, "INSERT INTO checkpoints VALUES (7, 7, 1, 'x')") and None,
        "checkpointed at step 7 in session 1, whose events do not tell of it",
    ),
    "episodes set aside by nobody": (set_aside, "was set aside, and no session was ever restored"),
    "published to an engine that is not there": (
        on_event("published", lambda event: event.update(engines=["engine-9"]), 2),
        "published to ['engine-9'], which the run does not have",
    ),
    "another interval of evaluations": (
        together(on_config("every = 4", "every = 8")),
        "it has evaluation.every = 8, and the run had 4",
    ),
}


def _checkpoint(lines: list[Line]) -> Line:
    return next(line for line in lines if line["kind"] == "checkpoint")


def test_an_untouched_run_passes_with_all_digests_computed_again(judged: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(judged, tmp_path / "copy")
    reseal(copy)
    assert audited(copy, 1000) == ""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found_by_another_record(name: str, judged: Path, tmp_path: Path) -> None:
    forge, expected = FORGERIES[name]
    copy = shutil.copytree(judged, tmp_path / "copy", ignore=shutil.ignore_patterns("tensorboard", "logs"))
    forge(copy)
    reseal(copy)
    found = [f"{violation.where}: {violation.what}" for violation in run_audit(copy).violations]
    assert any(expected in what for what in found), found


def test_a_users_file_among_the_kept_versions_is_left_alone(judged: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(judged, tmp_path / "copy")
    shutil.copy(copy / "versions" / "0000005.safetensors", copy / "versions" / "best-so-far.safetensors")
    assert audited(copy, 5) == ""
