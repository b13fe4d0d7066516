"""Why turns end, from the engine to the scorer, the files, `show` and the audit of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from integration_project import CONFIG, Project

JUDGE = """
from headrace import Task

def tasks():
    for i in range(64):
        yield Task(id=f"t{i}", prompt=f"w{i % 16}")

def score(task, attempt):
    [turn] = attempt.turns
    sampled = [f"w{token}" for token in turn.tokens if token != 17]
    if turn.stop == "end":
        right = turn.tokens[-1] == 17 and turn.text.split() == sampled
    elif turn.stop == "stop_string":
        right = turn.stop_string == sampled[-1] and turn.text.split() == sampled[:-1]
    else:
        right = turn.stop == "length" and len(turn.tokens) == 8 and turn.text.split() == sampled
    if not right or {"w5", "w6"} & set(turn.text.split()):
        raise ValueError(f"{turn}")
    return len(turn.tokens) / 8 + turn.tokens[0] / 100
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Project:
    path = tmp_path_factory.mktemp("stops")
    (path / "model").symlink_to(small_model)
    (path / "user.py").write_text(JUDGE)
    (path / "config.toml").write_text(CONFIG)
    project = Project(path)
    summary = project.train("--set", "training.steps=4", "--set", 'environment.stop_strings=["w5", "w6"]')
    assert "scorer_error" not in summary["ledger"]["dropped"]
    return project


def lines(project: Project) -> list[dict[str, Any]]:
    files = sorted((project.run / "episodes").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_stop_string_an_end_and_a_length_are_told_apart_everywhere(run: Project) -> None:
    found = lines(run)
    turns = [turn for line in found for turn in line["turns"]]
    assert {turn["stop"] for turn in turns} == {"end", "stop_string", "length"}
    assert {turn["stop_string"] for turn in turns} == {None, "w5", "w6"}
    for line, turn in zip(found, turns, strict=True):
        assert (turn["stop"] == "stop_string") == (turn["tokens"][-1] in (5, 6))
        assert not {"w5", "w6"} & set(line["text"].split())
    shown = json.loads(run.headrace("show", str(run.run), "--json", "-n", "100").stdout)["episodes"]
    assert {tuple(one["stop"]) for one in shown} == {("end",), ("stop_string",), ("length",)}
    assert not any({"w5", "w6"} & set(one["text"].split()) for one in shown)
    audited = run.audit()
    assert audited["ok"], audited["violations"]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("length", {"stop": "end"}, "stops by 'end'"),
        ("end", {"stop": "length"}, "stops by 'length'"),
        ("stop_string", {"stop": "end", "stop_string": None}, "stops by 'end'"),
        ("stop_string", {"stop_string": None}, "a turn that a stop string ended names it"),
        ("length", {"stop": "cancelled"}, "no turn that was trained on does"),
        ("end", {"tokens": [1, 2], "stop": "length"}, "'length', with 2 tokens to [1, 2], and may have 8"),
        ("length", {"stop": "stop_string", "stop_string": "w5"}, "the stop string 'w5' is not in its text"),
        ("length", {"stop": "stop_string", "stop_string": "w"}, "the stop string 'w' is none of the run's"),
    ],
)
def test_an_audit_finds_an_end_that_is_none(run: Project, kind: str, change: dict[str, Any], words: str) -> None:
    files = sorted((run.run / "episodes").glob("*.jsonl"))
    file = next(one for one in files if f'"stop":"{kind}"' in one.read_text())
    before = file.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    turn = next(row["turns"][0] for row in rows if row["turns"][0]["stop"] == kind)
    turn.update(change)
    for column in ("logprobs", "versions"):
        turn[column] = (turn[column] * 2)[: len(turn["tokens"])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = [violation["what"] for violation in run.audit()["violations"]]
    file.write_text(before)
    assert any(words in what for what in told), told
