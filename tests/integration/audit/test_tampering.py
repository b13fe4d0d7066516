"""Forged runs, and what the audit says of each."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from forging import Tampering, settle
from outcomes import Outcome, Outcomes, audited
from tamperings import TAMPERINGS, UNSEEABLE


def content(run: Path) -> dict[str, Any]:
    """All that a folder holds. The ledger by its rows: its file changes with every look at it."""
    plain = [file for file in run.rglob("*") if file.is_file() and "sqlite" not in file.name]
    files = {str(file.relative_to(run)): file.read_bytes() for file in plain}
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        return {**files, "ledger": [*db.iterdump()]}


def test_names_are_told_apart_and_known():
    names = {tampering.name for tampering in TAMPERINGS}
    assert len(names) == len(TAMPERINGS)
    assert set(UNSEEABLE) <= names


@pytest.mark.parametrize("kind", ["plain", "resumed"])
def test_figures_computed_again_are_those_that_were_written(kind: str, runs: dict[str, Path], tmp_path: Path):
    """Forgers' figures follow from the records exactly as the run's own did."""
    copy = tmp_path / "copy"
    shutil.copytree(runs[kind], copy)
    settle(copy)
    for name in ("metrics.jsonl", "events.jsonl"):
        before = [json.loads(line) for line in (runs[kind] / name).read_text().splitlines()]
        assert [json.loads(line) for line in (copy / name).read_text().splitlines()] == before
    assert json.loads((copy / "summary.json").read_text()) == json.loads((runs[kind] / "summary.json").read_text())


@pytest.mark.parametrize("kind", ["plain", "resumed"])
def test_an_untouched_run_passes(kind: str, runs: dict[str, Path]):
    assert audited(runs[kind]) == ("unnoticed", "")


@pytest.mark.parametrize("tampering", TAMPERINGS, ids=lambda tampering: tampering.name)
def test_a_forged_run_is_audited(
    tampering: Tampering, runs: dict[str, Path], tmp_path: Path, forged: Outcomes
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs[tampering.run], copy, ignore=shutil.ignore_patterns("tensorboard", "logs", "report.png"))
    before = content(copy)
    tampering.apply(copy)
    assert content(copy) != before, "the forgery changes nothing"
    forged.add(Outcome(tampering.name, tampering.invented, *audited(copy), tampering.unseeable))
    shutil.rmtree(copy)
