"""Trials are counted once each, by what came of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import figures


def reports(name: str, how: str, *, passed: bool = True) -> list[SimpleNamespace]:
    """As pytest has them of one test: its own and its teardown's, each with the test's properties."""
    properties = [(figures.PROPERTY, ("tamperings", {"name": name, "found_by": how}))]
    return [
        SimpleNamespace(when=when, passed=passed, user_properties=properties, nodeid=name)
        for when in ("call", "teardown")
    ]


def test_each_trial_is_a_row_and_those_count_that_records_or_a_replay_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(figures.FOLDER, str(tmp_path))
    said: list[str] = []
    found = [*reports("c", "replay"), *reports("a", "records"), *reports("b", "nobody", passed=False)]
    figures.report([SimpleNamespace(nodeid="no report"), *found], said.append)
    result = json.loads((tmp_path / "tamperings.json").read_text())
    assert [(row["name"], row["held"]) for row in result["rows"]] == [("a", True), ("b", False), ("c", True)]
    assert result["figures"] == {
        "tamperings_tried": 3,
        "tamperings_found": 2,
        "tamperings_found_by_nobody": 1,
        "tamperings_found_by_records": 1,
        "tamperings_found_by_replay": 1,
    }
    assert said[0].startswith("tamperings: tamperings_tried 3, tamperings_found 2")


def test_a_damage_that_is_not_handled_does_not_count() -> None:
    rows = [{"name": "a", "held": True}, {"name": "b", "held": False}]
    assert figures.summarize("resume-damages", rows) == {"resume_damages_tried": 2, "resume_damages_handled": 1}


def test_templates_are_counted_by_conversation_and_by_template() -> None:
    rows = [{"name": f"{t}: {n}", "template": t, "equal": n < 2} for t in "ab" for n in range(3)]
    assert figures.summarize("templates", rows) == {
        "templates_tried": 6,
        "templates_equal": 4,
        "templates_distinct": 2,
    }
