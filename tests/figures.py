"""What a group of trials came to: one row for each, a table when the tests have ended, and a file of figures.

A trial is a test that must hold and whose outcome is worth counting: a forged run, a planted bug, a damaged folder.
Rows travel with the tests' reports, so that they are counted once however many processes run the tests.

    HEADRACE_RESULTS=benchmarks/results pytest tests/integration/audit      # writes audit-tamperings.json, …
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = "HEADRACE_RESULTS"
"""Environment variable: the folder that results are written to. Without it they are only printed."""
PROPERTY = "trial"

Row = Mapping[str, Any]

COUNTED: dict[str, tuple[str, Callable[[Row], bool]]] = {
    "tamperings": ("tamperings_found", lambda row: row["found_by"] in ("records", "replay")),
    "planted-bugs": ("planted_bugs_found", lambda row: row["found_by"] in ("records", "replay")),
    "newcomer-mistakes": ("newcomer_mistakes_refused_well", lambda row: row["held"]),
    "resume-damages": ("resume_damages_handled", lambda row: row["held"]),
    "templates": ("templates_equal", lambda row: row["equal"]),
    "template-refusals": ("template_refusals_agreed", lambda row: row["agreed"]),
}
"""For each kind of trial the figure that counts it, and the rows that count."""


_ENDS = ("_refused_well", "_found", "_handled", "_equal", "_agreed")
"""What a figure says of what it counts; how many were tried is the same name with "_tried"."""


def summarize(kind: str, rows: list[dict[str, Any]]) -> dict[str, int]:
    """The figures of one kind of trial."""
    name, counts = COUNTED[kind]
    stem = next(name.removesuffix(end) for end in _ENDS if name.endswith(end))
    found_by = Counter(row["found_by"] for row in rows if "found_by" in row)
    by = {f"{stem}_found_by_{how}": count for how, count in sorted(found_by.items())}
    if templates := {row["template"] for row in rows if "template" in row}:
        by[f"{stem}_distinct"] = len(templates)
    return {f"{stem}_tried": len(rows), name: sum(map(counts, rows)), **by}


def report(reports: Iterable[Any], say: Callable[[str], None]) -> None:
    """Print what the trials among the tests' reports came to, and write it where the environment says."""
    trials: dict[str, list[dict[str, Any]]] = {}
    for one in reports:
        for kind, row in (value for name, value in getattr(one, "user_properties", ()) if name == PROPERTY):
            # Rows are taken from the report of the test itself; later reports of the same test repeat them.
            if one.when == "call":
                trials.setdefault(kind, []).append({**row, "held": one.passed})
    for kind, rows in sorted(trials.items()):
        figures = summarize(kind, rows)
        say(f"{kind}: " + ", ".join(f"{name} {number}" for name, number in figures.items()))
        if folder := os.environ.get(FOLDER):
            from headrace.bench import result

            found = result(kind, sorted(rows, key=lambda row: row["name"]), figures)
            text = json.dumps(found, indent=1, ensure_ascii=False)
            (Path(folder) / f"{kind}.json").write_text(text + "\n")
