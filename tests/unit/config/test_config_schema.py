"""The configuration's keys are public: a change to them is a decision, made by changing schema.txt."""

from __future__ import annotations

from pathlib import Path

from headrace.config import schema

FILE = Path(__file__).with_name("schema.txt")


def test_the_schema_is_the_one_written_down() -> None:
    stated = [f"{key.path} | {key.accepts} | {key.default}" for key in schema.all_keys()]
    assert stated == FILE.read_text(encoding="utf-8").splitlines()


def test_a_key_that_may_be_left_empty_is_empty_by_default() -> None:
    """Otherwise a dumped configuration could not say None."""
    empty = [key.path for key in schema.all_keys() if key.default == "None"]
    assert "buffer.depth" in empty
    assert "evaluation.tasks" in empty
