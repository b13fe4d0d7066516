"""Forged runs, and what the audit says of each."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from forging import Tampering, settle
from tamperings import TAMPERINGS

from headrace.audit import run_audit
from headrace.errors import HeadraceError

RECOMPUTE = 12
BASELINE = "HEADRACE_TAMPERING_BASELINE"
"""Environment variable: a file to which the outcomes are written as JSON."""


class Outcome(NamedTuple):
    """What became of one forgery."""

    name: str
    invented: bool
    outcome: str
    """found, unnoticed or crashed."""
    by: str
    """The first violation, the refusal, or the exception."""


def audited(run: Path) -> tuple[str, str]:
    """What `headrace audit RUN --recompute 12` makes of a folder: how it ended, and by what."""
    try:
        report = run_audit(run, RECOMPUTE)
    except HeadraceError as error:
        return "found", f"refused: {error}"
    except Exception as error:  # a crash of any kind is what is looked for
        return "crashed", f"{type(error).__name__}: {error}"
    if report.ok:
        return "unnoticed", ""
    first = report.violations[0]
    return "found", f"{len(report.violations)} × {first.law}, {first.where}: {first.what}"


def content(run: Path) -> dict[str, Any]:
    """All that a folder holds. The ledger by its rows: its file changes with every look at it."""
    files = {
        str(file): file.read_bytes() for file in run.rglob("*") if file.is_file() and "sqlite" not in file.name
    }
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db:
        return {**files, "ledger": [*db.iterdump()]}


def attempted(tampering: Tampering, run: Path, folder: Path) -> Outcome:
    copy = folder / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("tensorboard", "logs", "report.png"))
    try:
        before = content(copy)
        tampering.apply(copy)
        assert content(copy) != before, f"nothing is changed: {tampering.name}"
        return Outcome(tampering.name, tampering.invented, *audited(copy))
    finally:
        shutil.rmtree(copy)


def report(kind: str, outcomes: list[Outcome]) -> None:
    print()
    for one in outcomes:
        print(f"{one.outcome:10} {'own  ' if one.invented else 'known'} {one.name}  [{one.by[:150]}]")
    counts = {name: sum(one.outcome == name for one in outcomes) for name in ("found", "unnoticed", "crashed")}
    print(f"{kind}: {len(outcomes)} tried, {counts}")
    if folder := os.environ.get(BASELINE):
        (Path(folder) / f"{kind}.json").write_text(
            json.dumps([one._asdict() for one in outcomes], indent=1, ensure_ascii=False) + "\n"
        )


def test_names_are_told_apart():
    assert len({tampering.name for tampering in TAMPERINGS}) == len(TAMPERINGS)


def test_figures_computed_again_are_those_that_were_written(plain: Path, resumed: Path, tmp_path: Path):
    """Forgers' figures follow from the records exactly as the run's own did."""
    for run in (plain, resumed):
        copy = tmp_path / run.parent.parent.name
        shutil.copytree(run, copy)
        settle(copy)
        for name in ("metrics.jsonl", "events.jsonl"):
            before = [json.loads(line) for line in (run / name).read_text().splitlines()]
            assert [json.loads(line) for line in (copy / name).read_text().splitlines()] == before
        assert json.loads((copy / "summary.json").read_text()) == json.loads((run / "summary.json").read_text())


def test_untouched_runs_pass(plain: Path, resumed: Path):
    assert audited(plain) == ("unnoticed", "")
    assert audited(resumed) == ("unnoticed", "")


def test_forged_runs_are_collected(plain: Path, resumed: Path, tmp_path: Path):
    runs = {"plain": plain, "resumed": resumed}
    outcomes = [attempted(tampering, runs[tampering.run], tmp_path) for tampering in TAMPERINGS]
    report("tamperings", outcomes)
    assert len(outcomes) == len(TAMPERINGS)
