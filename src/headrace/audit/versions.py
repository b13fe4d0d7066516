"""The tree of versions and the sessions that made it: numbers, parents, steps, what a restore left behind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from headrace.audit.evidence import Evidence
from headrace.audit.findings import LEDGER, RECORDS, Violation, some
from headrace.config.changes import forbidden_changes
from headrace.config.load import config_of_text
from headrace.errors import InputError
from headrace.ledger import Ledger

_BEHIND = 4
"""So many steps telemetry may be behind the ledger when a run dies."""


class Version(NamedTuple):
    """A row of the ledger's versions."""

    number: int
    parent: int | None
    step: int
    session: int
    orphaned: bool

    @property
    def was_lost(self) -> bool:
        """Whether it stands for a row that was lost with an older ledger (`Lost`): its step is unknown."""
        return self.orphaned and self.step == 0 and self.number > 0


class Session(NamedTuple):
    """A row of the ledger's sessions."""

    number: int
    started: float
    restored: int | None
    config: str
    finished: bool


class Tree:
    """All versions of a run; they grow with its steps, not with its episodes."""

    def __init__(self, ledger: Ledger):
        self.sessions = [
            Session(number, started, restored, config, bool(finished))
            for number, started, restored, config, finished in ledger.rows(
                "SELECT number, started, restored, config, finished FROM sessions ORDER BY number"
            )
        ]
        self.versions = {
            row[0]: Version(row[0], row[1], row[2], row[3], bool(row[4]))
            for row in ledger.rows("SELECT number, parent, step, session, orphaned FROM versions ORDER BY number")
        }
        self.surviving = {number for number, version in self.versions.items() if not version.orphaned}
        self.newest = max(self.versions, default=-1)
        self.first_of: dict[int, int] = {}
        """Each session's first version."""
        for version in self.versions.values():
            self.first_of.setdefault(version.session, version.number)
        self.step_of_newest = max((self.versions[number].step for number in self.surviving), default=0)

    @cached_property
    def may_lack(self) -> set[int]:
        """Steps whose lines a crash may have taken: telemetry writes beside training, a few steps behind it."""
        ended = [self.versions[s.restored].step for s in self.sessions if s.restored in self.versions]
        if self.sessions and not self.sessions[-1].finished:
            ended.append(self.step_of_newest)
        return {step for end in ended for step in range(end - _BEHIND + 1, end + 1)}

    def is_trained(self, version: Version) -> bool:
        """Whether a training step made it: the others are first versions, and restored ones under a new number."""
        parent = self.versions.get(-1 if version.parent is None else version.parent)
        return parent is not None and version.step == parent.step + 1


def check_sessions(evidence: Evidence, tree: Tree) -> Iterator[Violation]:
    """Sessions follow each other, and each took up what the ones before had left."""
    alive: set[int] = set()
    by_session: dict[int, list[Version]] = {}
    for version in tree.versions.values():
        by_session.setdefault(version.session, []).append(version)
    for place, session in enumerate(tree.sessions, start=1):
        where = f"session {session.number}"
        if session.number != place:
            yield Violation(LEDGER, where, f"sessions are numbered from 1, and this is the {place}.")
        if session.restored is not None and session.restored not in alive:
            yield Violation(LEDGER, where, f"it was restored from version {session.restored}, which it had not")
        alive = _lineage(tree, session.restored)
        alive |= {v.number for v in by_session.get(session.number, ()) if not v.was_lost}
        yield from _check_config(evidence, session, where)
    for number in by_session.keys() - {session.number for session in tree.sessions}:
        yield Violation(LEDGER, f"session {number}", "versions are of it, and it is not in the ledger")
    if alive != tree.surviving:
        wrong = some(alive ^ tree.surviving)
        yield Violation(LEDGER, "versions", f"what restores left behind is not what is marked so: {wrong}")


def _lineage(tree: Tree, number: int | None) -> set[int]:
    found: set[int] = set()
    while number is not None and number in tree.versions and number not in found:
        found.add(number)
        number = tree.versions[number].parent
    return found


def _check_config(evidence: Evidence, session: Session, where: str) -> Iterator[Violation]:
    if not session.config:
        return
    try:
        config = config_of_text(session.config, where)
    except InputError as error:
        yield Violation(RECORDS, where, f"its configuration in the ledger is none: {error}")
        return
    for key, before, after in forbidden_changes(config, evidence.config):
        yield Violation(RECORDS, where, f"{key} was {before!r}, and in the last session {after!r}")


def check_versions(tree: Tree) -> Iterator[Violation]:
    """Numbers are given out once and in order; a version's parent came before it, by one step or by a restore."""
    for place, version in enumerate(tree.versions.values()):
        number, parent = version.number, version.parent
        where = f"version {number}"
        if number != place:
            yield Violation(LEDGER, where, f"versions are numbered from 0, and this is the {place + 1}.")
            return
        if number and version.session < tree.versions[number - 1].session:
            yield Violation(LEDGER, where, "it is of an earlier session than the version before it")
        if parent is None:
            if version.step or number != tree.first_of[version.session]:
                yield Violation(LEDGER, where, f"it has no parent, and is of step {version.step}")
            continue
        if parent >= number or parent not in tree.versions:
            yield Violation(LEDGER, where, f"its parent {parent} is not an earlier version")
            continue
        if version.was_lost:
            continue
        first = number == tree.first_of[version.session]
        session = next((s for s in tree.sessions if s.number == version.session), None)
        restored = session is not None and session.restored == parent
        before = tree.versions[parent]
        if first and not restored:
            yield Violation(
                LEDGER, where, f"its session was restored from another version than its parent {parent}"
            )
        elif not first and parent != number - 1:
            yield Violation(LEDGER, where, f"its parent is {parent}, and not the version before it")
        if version.step != before.step + 1 and not (first and version.step == before.step):
            what = f"it is of step {version.step}, and its parent {parent} of step {before.step}"
            yield Violation(LEDGER, where, what)
