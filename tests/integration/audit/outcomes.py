"""What the audit makes of folders, collected into a table and into figures."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.audit import run_audit
from headrace.errors import HeadraceError

ALL = 1_000_000
"""Episodes to recompute: every one."""
FOLDER = "HEADRACE_OUTCOMES"
"""Environment variable: the folder that tables and figures are written to, as JSON."""

RECORDS, REPLAY, DIGEST, NOBODY = "records", "replay", "digest", "nobody"
"""What finds it: records that contradict each other; a replay under the kept weights; a file's digest; nothing."""


class Outcome(NamedTuple):
    """What became of one forgery or bug."""

    name: str
    invented: bool
    found_by: str
    what: str
    """The first violation, or the refusal."""


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
            print(f"{one.found_by:8} {'own  ' if one.invented else 'known'} {one.name}  [{one.what[:150]}]")
        counts = Counter(one.found_by for one in self._all)
        print(f"{self._kind}: {len(self._all)} tried, found by {dict(counts)}")
        if folder := os.environ.get(FOLDER):
            table = {
                "tried": len(self._all),
                "found": counts[RECORDS] + counts[REPLAY],
                "found_by": dict(counts),
                "rows": [one._asdict() for one in self._all],
            }
            text = json.dumps(table, indent=1, ensure_ascii=False)
            (Path(folder) / f"audit-{self._kind}.json").write_text(text + "\n")


def audited(run: Path, recompute: int = 0) -> str:
    """What `headrace audit RUN` finds first; empty if it finds nothing."""
    try:
        report = run_audit(run, recompute)
    except HeadraceError as error:
        return f"refused: {error}"
    if report.ok:
        return ""
    first = report.violations[0]
    return f"{len(report.violations)} × {first.law}, {first.where}: {first.what}"


def found_by(sealed: Path, unsealed: Callable[[], Path]) -> tuple[str, str]:
    """What finds a forgery, and how it is told. `sealed` has every digest computed again, `unsealed` makes the
    folder with the digests as they were."""
    if what := audited(sealed):
        return RECORDS, what
    if what := audited(sealed, ALL):
        return REPLAY, what
    if what := audited(unsealed(), ALL):
        return DIGEST, what
    return NOBODY, ""
