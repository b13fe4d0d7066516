"""What an audit found: violations, and what it could not look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PROVENANCE, STALENESS, LEDGER, SWAP = "provenance", "staleness bound", "ledger", "atomic swap"
RECORDS = "records agree"
"""Files of a run that say different things of the same; none of the four laws, and what they rest on."""
CORRUPTION = "corruption"
"""A file's bytes are not those that were written. Whoever changes a file on purpose changes its digest, too."""

MOST_VIOLATIONS = 1000
"""So many are listed; of others only the number is told."""


class Violation(NamedTuple):
    """One place where a law does not hold."""

    law: str
    where: str
    what: str


@dataclass
class Findings:
    """Violations as they are found, and what was looked at."""

    violations: list[Violation] = field(default_factory=list)
    more: int = 0
    """Violations beyond those listed."""
    checked: Counter[str] = field(default_factory=Counter)
    unchecked: dict[str, str] = field(default_factory=dict)
    """What could not be looked at, and why."""

    def add(self, law: str, where: str, what: str) -> None:
        if len(self.violations) < MOST_VIOLATIONS:
            self.violations.append(Violation(law, where, what))
        else:
            self.more += 1

    def extend(self, found: Iterable[Violation]) -> None:
        for violation in found:
            self.add(*violation)

    @property
    def ok(self) -> bool:
        return not self.violations

    def as_dict(self) -> dict[str, Any]:
        return {
            "violations": [violation._asdict() for violation in self.violations],
            "more_violations": self.more,
            "checked": dict(sorted(self.checked.items())),
            "unchecked": self.unchecked,
        }


def some(numbers: Iterable[int]) -> str:
    """A few of many, for a message: 3, 4, 5, … (12 in all)."""
    found = sorted(numbers)
    text = ", ".join(map(str, found[:5]))
    return text if len(found) <= 5 else f"{text}, … ({len(found)} in all)"
