"""What the audit makes of folders, collected into a table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from headrace.audit import run_audit
from headrace.errors import HeadraceError

RECOMPUTE = 12
FOLDER = "HEADRACE_OUTCOMES"
"""Environment variable: the folder that tables are written to, as JSON."""


class Outcome(NamedTuple):
    """What became of one forgery or bug."""

    name: str
    invented: bool
    outcome: str
    """found, unnoticed or crashed."""
    by: str
    """The first violation, the refusal, or the exception."""
    unseeable: str = ""


class Outcomes:
    """The outcomes of one kind, in the order they came."""

    def __init__(self, kind: str):
        self._kind = kind
        self._all: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self._all.append(outcome)

    def report(self) -> None:
        """Print the table, and write it where the environment says."""
        print()
        for one in self._all:
            print(f"{one.outcome:10} {'own  ' if one.invented else 'known'} {one.name}  [{one.by[:150]}]")
        counts = {name: sum(one.outcome == name for one in self._all) for name in ("found", "unnoticed", "crashed")}
        print(f"{self._kind}: {len(self._all)} tried, {counts}")
        if folder := os.environ.get(FOLDER):
            table = json.dumps([one._asdict() for one in self._all], indent=1, ensure_ascii=False)
            (Path(folder) / f"baseline-{self._kind}.json").write_text(table + "\n")


def audited(run: Path, recompute: int = RECOMPUTE) -> tuple[str, str]:
    """How `headrace audit RUN --recompute 12` ends, and by what."""
    try:
        report = run_audit(run, recompute)
    except HeadraceError as error:
        return "found", f"refused: {error}"
    except Exception as error:  # whatever it is: the audit has crashed
        return "crashed", f"{type(error).__name__}: {error}"
    if report.ok:
        return "unnoticed", ""
    first = report.violations[0]
    return "found", f"{len(report.violations)} × {first.law}, {first.where}: {first.what}"
