"""Forged runs, and what finds each."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from expected import EXPECTED
from forging import Tampering, reseal, settle
from outcomes import ALL, RECORDS, REPLAY, audited, found_by
from tamperings import TAMPERINGS, UNSEEABLE

IN_CI = 6
"""Every so many-th is tried by `make test`, all by `make test-full`."""


def content(run: Path) -> dict[str, Any]:
    """All that a folder holds. The ledger by its rows: its file changes with every look at it."""
    plain = [file for file in run.rglob("*") if file.is_file() and "sqlite" not in file.name]
    files = {str(file.relative_to(run)): file.read_bytes() for file in plain}
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        return {**files, "ledger": [*db.iterdump()]}


def copy_of(run: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run, place, ignore=shutil.ignore_patterns("tensorboard", "logs", "report.png"))
    return place


def test_names_are_told_apart_and_known():
    names = {tampering.name for tampering in TAMPERINGS}
    assert len(names) == len(TAMPERINGS)
    assert set(UNSEEABLE) | set(EXPECTED) <= names


@pytest.mark.parametrize("kind", ["plain", "resumed"])
def test_figures_computed_again_are_those_that_were_written(kind: str, runs: dict[str, Path], tmp_path: Path):
    """Forgers' figures and digests follow from the records exactly as the run's own did."""
    copy = copy_of(runs[kind], tmp_path / "copy")
    settle(copy)
    reseal(copy)
    for name in ("metrics.jsonl", "events.jsonl"):
        before = [json.loads(line) for line in (runs[kind] / name).read_text().splitlines()]
        assert [json.loads(line) for line in (copy / name).read_text().splitlines()] == before
    before, after = (json.loads((run / "summary.json").read_text()) for run in (runs[kind], copy))
    assert before | {"digests": {}} == after | {"digests": {}}


@pytest.mark.parametrize("kind", ["plain", "resumed"])
def test_an_untouched_run_passes(kind: str, runs: dict[str, Path]):
    assert audited(runs[kind], ALL) == ""


def cases() -> list[Any]:
    marks = [[] if place % IN_CI == 0 else [pytest.mark.full] for place in range(len(TAMPERINGS))]
    return [pytest.param(one, marks=mark, id=one.name) for one, mark in zip(TAMPERINGS, marks, strict=True)]


@pytest.mark.parametrize("tampering", cases())
def test_a_forged_run_is_found(
    tampering: Tampering, runs: dict[str, Path], tmp_path: Path, trial: Callable[..., None]
):
    copy = copy_of(runs[tampering.run], tmp_path / "copy")
    before = content(copy)
    tampering.apply(copy)
    assert content(copy) != before, "the forgery changes nothing"
    reseal(copy)

    def unsealed() -> Path:
        tampering.apply(copy_of(runs[tampering.run], copy))
        return copy

    how, what = found_by(copy, unsealed)
    trial("tamperings", name=tampering.name, invented=tampering.invented, found_by=how, what=what[:300])
    shutil.rmtree(copy)
    assert how in (RECORDS, REPLAY) or EXPECTED.get(tampering.name) == how, f"{how}: {what}"
