"""What the audit makes of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.audit import run_audit
from headrace.errors import HeadraceError

ALL = 1_000_000
"""Episodes to recompute: every one."""
RECORDS, REPLAY, DIGEST, NOBODY = "records", "replay", "digest", "nobody"
"""What finds it: records that contradict each other; a replay under the kept weights; a file's digest; nothing."""


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
