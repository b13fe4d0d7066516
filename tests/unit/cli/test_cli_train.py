"""`headrace train` prepares the run's folder, runs, and says how it went."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_answer import Answer

from headrace.cli import train
from headrace.config.load import read_config
from headrace.config.run import RunConfig
from headrace.errors import ComponentDied

SUMMARY: dict[str, Any] = {
    "steps": 20,
    "seconds": 12.5,
    "eval_before": 0.125,
    "eval_after": 0.875,
    "staleness_max": 2,
    "finished": True,
    "ledger": {"admitted": 640, "trained": 600, "in_flight": 0, "dropped": {"run_finished": 40}},
}


class FakeRun:
    """Stands where the orchestration stands; notes what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[RunConfig, Path, bool, bool]] = []
        self.error: Exception | None = None

    def run(
        self, config: RunConfig, folder: Path, *, resume: bool, from_step: int | None, progress: bool
    ) -> dict[str, Any]:
        self.calls.append((config, folder, resume, progress))
        print("a user's scorer prints this")
        os.system("echo and a child process prints that")
        if self.error is not None:
            raise self.error
        return SUMMARY


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    import headrace.orchestration as room

    fake, module = FakeRun(), ModuleType("headrace.orchestration.local")
    module.run = fake.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.orchestration.local", module)
    monkeypatch.setattr(room, "local", module, raising=False)
    return fake


Headrace = Callable[..., Answer]


def test_a_run_gets_its_folder_and_its_resolved_configuration(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    answer = headrace("train", project, "--set", "training.steps=20")
    assert answer.code == 0, answer.err
    [(config, folder, resume, progress)] = fake_run.calls
    assert (folder, resume, progress) == (Path("runs/run"), False, True)
    assert config.training.steps == 20
    assert read_config("runs/run/config.toml") == config


def test_the_summary_says_how_it_went_and_what_to_do_next(
    project: Path, headrace: Headrace, fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.shutil, "which", lambda name: name)
    out = headrace("train", project).out
    assert "20 in 12.5 s" in out
    assert "12.5% → 87.5%" in out
    assert "at most 2 versions" in out
    assert "640 admitted = 600 trained + 40 dropped + 0 in flight (dropped: run_finished 40)" in out
    assert "runs/run/report.png" in out
    assert "headrace audit runs/run" in out


def test_next_is_what_the_shell_will_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train.myself() == ".venv/bin/headrace"
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    assert train.myself() == "nowhere/bin/headrace"
    (tmp_path / "headrace").touch(0o755)
    assert train.myself() == "headrace"


def test_json_is_one_object_whatever_else_is_printed(project: Path, headrace: Headrace, fake_run: FakeRun) -> None:
    answer = headrace("train", project, "--json")
    assert json.loads(answer.out) == SUMMARY
    assert answer.out.count("\n") == 1
    assert "a user's scorer prints this" in answer.err
    assert "and a child process prints that" in answer.err


def test_the_folder_is_named_by_the_option_or_the_configuration_or_the_file(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    headrace("train", project, "--set", "name=mine")
    headrace("train", project, "--run", "elsewhere/x", "--set", "name=mine")
    assert [folder for _, folder, _, _ in fake_run.calls] == [Path("runs/mine"), Path("elsewhere/x")]


def test_a_run_that_is_there_is_kept_unless_told_otherwise(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    headrace("train", project)
    Path("runs/run/metrics.jsonl").write_text("{}\n")
    answer = headrace("train", project)
    assert answer.code == 2
    assert "--resume" in answer.err
    assert "--overwrite" in answer.err
    assert Path("runs/run/metrics.jsonl").is_file()
    assert headrace("train", project, "--overwrite").code == 0
    assert not Path("runs/run/metrics.jsonl").exists()
    assert len(fake_run.calls) == 2


def test_a_run_is_resumed_with_more_steps_but_not_with_another_model(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    headrace("train", project, "--set", "training.steps=20")
    (project.parent / "runs" / "run" / "ledger.sqlite").touch()
    answer = headrace("train", project, "--resume", "--set", "training.steps=40", "--set", "limits.batch_s=9")
    assert answer.code == 0, answer.err
    assert fake_run.calls[-1][2] is True
    assert fake_run.calls[-1][0].training.steps == 40
    assert read_config("runs/run/config.toml").training.steps == 20, "no session has begun with it"
    answer = headrace("train", project, "--resume", "--set", "training.group_size=4", "--set", "seed=7")
    assert answer.code == 2
    assert "seed: 0 became 7, training.group_size: 8 became 4" in answer.err
    assert read_config("runs/run/config.toml").training.group_size == 8
    assert len(fake_run.calls) == 2


def test_a_run_is_resumed_by_its_folder_with_all_that_it_was_begun_with(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    sets = ["--set", "seed=3", "--set", "training.steps=20", "--set", "training.optimizer.learning_rate=2e-6"]
    headrace("train", project, "--run", "runs/mine", *sets)
    (project.parent / "runs" / "mine" / "ledger.sqlite").touch()
    answer = headrace("train", "--resume", "runs/mine", "--set", "training.steps=30")
    assert answer.code == 0, answer.err
    config, folder, resume, _ = fake_run.calls[-1]
    assert (folder, resume) == (Path("runs/mine"), True)
    assert (config.seed, config.training.steps, config.training.optimizer.learning_rate) == (3, 30, 2e-6)
    answer = headrace("train", "--resume", "runs/mine", "--set", "seed=4")
    assert (answer.code, "seed: 3 became 4" in answer.err) == (2, True)
    answer = headrace("train", "runs/mine")
    assert (answer.code, "headrace train --resume runs/mine" in answer.err) == (2, True)
    answer = headrace("train", "--resume", "model")
    assert (answer.code, "holds a config.toml" in answer.err) == (2, True)
    assert len(fake_run.calls) == 2


def test_a_run_is_resumed_by_its_file_with_what_was_edited_since_and_no_override_again(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    project.write_text(project.read_text() + "[training]\nsteps = 400\ngroup_size = 16\n")
    headrace("train", project, "--set", "training.steps=20", "--set", "training.group_size=4", "--set", "seed=3")
    (project.parent / "runs" / "run" / "ledger.sqlite").touch()

    def resumed(*sets: str) -> tuple[int, int, int]:
        answer = headrace("train", project, "--resume", *sets)
        assert answer.code == 0, answer.err
        config = fake_run.calls[-1][0]
        return config.seed, config.training.steps, config.training.group_size

    assert resumed() == (3, 20, 4)
    assert resumed("--set", "training.steps=30") == (3, 30, 4)
    project.write_text(project.read_text().replace("steps = 400", "steps = 500"))
    assert resumed() == (3, 500, 4)
    assert resumed() == (3, 500, 4)
    project.write_text(project.read_text().replace("group_size = 16", "group_size = 32"))
    answer = headrace("train", project, "--resume")
    assert (answer.code, "training.group_size: 4 became 32" in answer.err) == (2, True)


def test_a_run_that_dies_exits_with_1_and_says_what_died(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    fake_run.error = ComponentDied("engine-0", "killed by signal 9", "look at runs/run/events.jsonl")
    answer = headrace("train", project, "--json")
    assert (answer.code, answer.out) == (1, "")
    assert "error: engine-0 ended unexpectedly: killed by signal 9\n  look at runs/run/events.jsonl\n" in answer.err
    assert "Traceback" not in answer.err


def test_an_unforeseen_error_exits_with_1_and_says_how_to_see_more(
    project: Path, headrace: Headrace, fake_run: FakeRun
) -> None:
    fake_run.error = ZeroDivisionError("division by zero")
    answer = headrace("train", project)
    assert answer.code == 1
    assert "error: unexpected ZeroDivisionError: division by zero\n  HEADRACE_DEBUG=1 shows where\n" in answer.err


def test_rewards_are_shown_as_numbers_and_warnings_stand_in_the_summary(
    project: Path, headrace: Headrace, fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"eval_before": -4.333, "eval_after": None, "eval_metric": "reward", "warnings": ["30 of 60 failed"]}
    monkeypatch.setitem(globals(), "SUMMARY", {**SUMMARY, **more})
    out = headrace("train", project).out
    assert re.search(r"reward +-4\.333 → –", out)
    assert re.search(r"warning +30 of 60 failed", out)
    assert "accuracy" not in out


def test_the_summary_has_every_set_with_its_interval_and_users_metrics(
    project: Path, headrace: Headrace, fake_run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard = {
        "metric": "accuracy",
        "pass_1": 0.25,
        "pass_k": 0.5,
        "samples": 4,
        "valid": True,
        "low95": 0.2,
        "high95": 0.3,
    }
    lines = [
        {"step": 0, "set": "held_out", "metric": "accuracy", "pass_1": 0.125,
         "sets": {"hard": {**hard, "pass_1": 0.0}}},
        {"step": 9, "set": "held_out", "metric": "accuracy", "pass_1": 0.875, "low95": 0.8, "high95": 0.9,
         "sets": {"hard": hard}},
    ]  # fmt: skip
    more = {"evaluations": lines, "eval_metric": "accuracy", "user": {f"m{i}": i / 3 for i in range(8)}}
    monkeypatch.setitem(globals(), "SUMMARY", {**SUMMARY, **more})
    out = " ".join(headrace("train", project).out.split())
    assert "accuracy 12.5% → 87.5% (95%: 80.0% to 90.0%)" in out
    assert "hard accuracy 0.0% → 25.0% (95%: 20.0% to 30.0%, pass@4 50.0%)" in out
    assert "metrics m0 0, m1 0.333, m2 0.667, m3 1, m4 1.33, m5 1.67, and 2 more" in out
