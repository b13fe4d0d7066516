"""What is given (a file, a folder, tables, an object) leads to a folder and a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.dump import dump_config
from headrace.config.run import RunConfig
from headrace.definitions import Definitions
from headrace.errors import ConfigError
from headrace.orchestration.opening import open_run, with_references
from headrace.scoring.rules import ExactMatch

TABLES: dict[str, Any] = {"model": {"path": "m"}, "tasks": {"type": "jsonl", "path": "t"}, "training": {"steps": 7}}


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has begun, with a seed of its own."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/run")
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_config(RunConfig.from_dict(TABLES, ["seed=3"])))
    return folder


def test_a_new_runs_folder_is_named_by_what_is_given(begun: Path) -> None:
    Path("mine.toml").write_text('model.path = "m"\ntasks = { type = "jsonl", path = "t" }\n')
    for given, run, sets, wanted in (
        (TABLES, None, [], "runs/run"),
        ({**TABLES, "name": "n"}, None, [], "runs/n"),
        (RunConfig(**TABLES, name="n"), None, [], "runs/n"),
        ("mine.toml", None, [], "runs/mine"),
        (Path("mine.toml"), None, ["name=n"], "runs/n"),
        (TABLES, "elsewhere", [], "elsewhere"),
    ):
        opened = open_run(given, sets, run, resume=False)
        assert str(opened.run.path) == wanted
        assert opened.config.seed == 0


def test_what_is_resumed_need_not_say_all_of_its_configuration(begun: Path) -> None:
    Path("run.toml").write_text("training.steps = 9\n")
    wanted = [
        (open_run("runs/run", resume=True), 7),
        (open_run(None, run="runs/run", resume=True), 7),
        (open_run({"training": {"steps": 8}}, resume=True), 8),
        (open_run("run.toml", resume=True), 9),
        (open_run("run.toml", ["training.steps=10"], resume=True), 10),
    ]
    for opened, steps in wanted:
        assert (opened.run.path, opened.config.seed, opened.config.training.steps) == (begun, 3, steps)


def test_what_leads_nowhere_is_refused(begun: Path) -> None:
    with pytest.raises(ConfigError, match="headrace train --resume runs/run"):
        open_run("runs/run", resume=False)
    with pytest.raises(ConfigError, match="a run is resumed in its own folder"):
        open_run("runs/run", run="runs/other", resume=True)
    with pytest.raises(ConfigError, match="a run has a configuration"):
        open_run(None, resume=True)
    with pytest.raises(ConfigError, match="tasks is required"):
        open_run({"model": {"path": "m"}}, run="runs/new", resume=True)


def test_classes_and_functions_in_tables_become_references_wherever_a_source_stands(begun: Path) -> None:
    table = {"scorer": [{"source": ExactMatch, "weight": 2}], "tasks": {"source": "t.py:f", "options": {"a": len}}}
    assert with_references(table, Definitions(begun)) == {
        "scorer": [{"source": "headrace.scoring.rules:ExactMatch", "weight": 2}],
        "tasks": {"source": "t.py:f", "options": {"a": len}},
    }


def test_code_goes_to_the_folder_of_the_run_however_that_is_named(begun: Path) -> None:
    Path("mine.toml").write_text('name = "n"\nmodel.path = "m"\ntasks = { type = "jsonl", path = "t" }\n')
    for given, run, resume, wanted in (
        (None, "runs/run", True, "runs/run"),
        (begun.absolute(), None, True, "runs/run"),
        (TABLES, begun.absolute(), False, "runs/run"),
        ("mine.toml", None, False, "runs/n"),
        (TABLES, "/elsewhere/run", False, "/elsewhere/run"),
    ):
        assert str(open_run(given, run=run, resume=resume).definitions.folder) == wanted
