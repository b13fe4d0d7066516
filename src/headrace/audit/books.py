"""The ledger's rows, each by itself and with its group: admitted = trained + dropped + in flight, and law 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from headrace.audit.evidence import Evidence
from headrace.audit.findings import LEDGER, STALENESS, Violation
from headrace.audit.versions import Tree
from headrace.ledger import (
    DROPPED,
    IN_FLIGHT,
    LOST_IN_CRASH,
    LOST_WITH_LEDGER,
    ORPHANED,
    TRAINED,
    episode_name,
    group_name,
)
from headrace.training.config import teacher_step

_REASON = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class Row(NamedTuple):
    """A row of the ledger's episodes."""

    id: str
    group: str
    sequence: int
    place: int
    task: str
    state: str
    reason: str | None
    tokens: int
    wasted: int
    admitted: int
    low: int | None
    high: int | None
    trained_at: int | None
    produced: int | None
    times: int
    session: int
    teacher: int | None


COLUMNS = (
    "id, group_id, sequence, place, task, state, reason, tokens, wasted, admitted_version, version_min,"
    " version_max, trained_at, produced, times_trained, session, teacher"
)


def check_books(evidence: Evidence, tree: Tree) -> Iterator[Violation]:
    """Every row, group by group in the order of admission."""
    rows = (Row(*row) for row in evidence.ledger.rows(f"SELECT {COLUMNS} FROM episodes ORDER BY sequence, place"))
    rules = _Rules(evidence, tree)
    before: Row | None = None
    for place, (sequence, members) in enumerate(groupby(rows, key=lambda row: row.sequence)):
        if sequence != place:
            yield Violation(LEDGER, f"group {place}", f"its episodes are [] of {rules.group_size}")
            return
        group = list(members)
        yield from rules.group(group)
        if before is not None:
            yield from rules.order(before, group[0])
        before = group[0]


class _Rules:
    def __init__(self, evidence: Evidence, tree: Tree):
        config = evidence.config
        self.group_size = config.training.group_size
        self._min_group = config.training.min_group
        self._epochs = config.training.epochs
        self._bound = config.buffer.staleness_bound
        self._in_order = config.buffer.order == "fifo"
        self._tree = tree
        self._sessions = {session.number: session for session in tree.sessions}
        self._last = max(self._sessions, default=0)
        self._distillation = config.training.distillation
        self._teachers_at: dict[int, set[int | None]] = {}
        """The last that was asked for."""
        self._produced: dict[int, int] = {}
        """The last version that each session's groups were trained into so far."""

    def group(self, group: list[Row]) -> Iterator[Violation]:
        first = group[0]
        where = f"group {first.sequence}"
        if [row.place for row in group] != list(range(self.group_size)):
            places = [row.place for row in group]
            yield Violation(LEDGER, where, f"its episodes are {places} of {self.group_size}")
        for name in ("task", "admitted", "session"):
            if len({getattr(row, name) for row in group}) > 1:
                yield Violation(LEDGER, where, f"its episodes differ in {name}")
        for row in group:
            name = group_name(row.sequence)
            if (row.group, row.id) != (name, episode_name(name, row.place)):
                yield Violation(LEDGER, row.id, f"it stands in the ledger as episode {row.place} of {row.group}")
            yield from self._row(row)
        into = {row.produced for row in group if row.produced is not None}
        if len(into) > 1:
            yield Violation(LEDGER, where, f"its episodes were trained into versions {sorted(into)}")
        trained = sum(row.produced is not None for row in group)
        if 0 < trained < self._min_group:
            yield Violation(
                LEDGER, where, f"{trained} of its episodes were trained, and {self._min_group} are needed"
            )
        if into and self._in_order:
            produced = max(into)
            if produced < self._produced.get(first.session, produced):
                what = f"an earlier group was trained later, into version {self._produced[first.session]}"
                yield Violation(LEDGER, where, f"trained into version {produced}: {what}")
            self._produced[first.session] = produced

    def order(self, before: Row, after: Row) -> Iterator[Violation]:
        """Admission goes on from one group to the next."""
        if LOST_WITH_LEDGER in (before.reason, after.reason):
            return
        where = f"group {after.sequence}"
        if after.session < before.session:
            yield Violation(
                LEDGER, where, f"it is of session {after.session}, after one of session {before.session}"
            )
        if after.session == before.session and after.admitted < before.admitted:
            what = f"admitted at version {after.admitted}, after one that was admitted at {before.admitted}"
            yield Violation(STALENESS, where, what)

    def _row(self, row: Row) -> Iterator[Violation]:
        session = self._sessions.get(row.session)
        if session is None:
            yield Violation(LEDGER, row.id, f"it is of session {row.session}, which is not in the ledger")
            return
        if row.reason == LOST_WITH_LEDGER:
            if row.state != DROPPED or row.tokens or row.produced is not None:
                yield Violation(LEDGER, row.id, "lost with an older ledger, and yet something is known of it")
            return
        if row.tokens < 0 or row.wasted < 0:
            yield Violation(LEDGER, row.id, f"{row.tokens} tokens, {row.wasted} wasted")
        if row.admitted not in self._tree.versions or row.admitted < self._first_version(row.session):
            yield Violation(
                STALENESS, row.id, f"admitted at version {row.admitted}, which its session did not have"
            )
        if row.state == IN_FLIGHT and (session.finished or row.session != self._last):
            yield Violation(LEDGER, row.id, f"in flight, though session {row.session} has ended")
        elif row.state == DROPPED:
            yield from self._dropped(row)
        elif row.state == TRAINED:
            if row.reason is not None:
                yield Violation(LEDGER, row.id, f"trained, and dropped with the reason {row.reason!r}")
            if row.produced not in self._tree.surviving:
                yield Violation(LEDGER, row.id, f"trained into version {row.produced}, which did not survive")
        elif row.state != IN_FLIGHT:
            yield Violation(LEDGER, row.id, f"in the state {row.state!r}")
        if row.state == TRAINED or row.reason == ORPHANED:
            yield from self._trained(row)
        elif (row.low, row.high, row.trained_at, row.produced, row.teacher, row.times) != (*[None] * 5, 0):
            yield Violation(
                LEDGER, row.id, f"{row.reason or row.state}, and yet it was trained at {row.trained_at}"
            )

    def _first_version(self, session: int) -> int:
        """The oldest version that may serve in a session: its first, or the restored one that kept its number."""
        first = self._tree.first_of.get(session, 0)
        restored = self._sessions[session].restored
        own = self._tree.versions.get(first)
        if restored is not None and (own is None or self._tree.is_trained(own)):
            return restored
        return first

    def _dropped(self, row: Row) -> Iterator[Violation]:
        if not row.reason:
            yield Violation(LEDGER, row.id, "dropped without a reason")
        elif not _REASON.fullmatch(row.reason):
            yield Violation(LEDGER, row.id, f"dropped with the reason {row.reason[:80]!r}, which is no word")
        elif row.reason == LOST_IN_CRASH and (self._sessions[row.session].finished or row.session == self._last):
            yield Violation(LEDGER, row.id, f"lost in a crash, and session {row.session} has had none")
        elif row.reason == ORPHANED and row.produced in self._tree.surviving:
            yield Violation(
                LEDGER, row.id, f"orphaned, and version {row.produced} that it was trained into survives"
            )

    def _trained(self, row: Row) -> Iterator[Violation]:
        version = self._tree.versions.get(-1 if row.produced is None else row.produced)
        if version is None:
            yield Violation(LEDGER, row.id, f"trained into version {row.produced}, which is not in the ledger")
            return
        if row.times != self._epochs:
            yield Violation(
                LEDGER, row.id, f"trained {row.times} times of {self._epochs}, into version {row.produced}"
            )
        if not version.was_lost and (row.trained_at != version.parent or version.session != row.session):
            what = f"trained at version {row.trained_at} in session {row.session}"
            made = f"version {version.number} was made from {version.parent} in session {version.session}"
            yield Violation(LEDGER, row.id, f"{what}; {made}")
        if row.low is None or row.high is None or row.trained_at is None:
            yield Violation(
                STALENESS, row.id, f"trained at {row.trained_at}, tokens of versions {row.low} to {row.high}"
            )
            return
        if not row.admitted <= row.low <= row.high <= row.trained_at:
            tokens = f"tokens of versions {row.low} to {row.high}"
            what = f"admitted at {row.admitted}, {tokens}, trained at {row.trained_at}"
            yield Violation(STALENESS, row.id, what)
        elif self._bound is not None and row.trained_at - row.low > self._bound:
            what = f"a token of version {row.low} was trained at {row.trained_at}, bound {self._bound}"
            yield Violation(STALENESS, row.id, what)
        if row.tokens == 0:
            yield Violation(LEDGER, row.id, "trained without a token")
        if row.teacher not in (expected := self._teachers(row.trained_at)):
            named = " or ".join(map(str, sorted(expected, key=str))) or "none that is known"
            yield Violation(LEDGER, row.id, f"held against a teacher of version {row.teacher}, and it was {named}")

    def _teachers(self, trained_at: int) -> set[int | None]:
        """What the teacher of a step, at this version of the trainer, may be called.

        In self-distillation it is the policy of an earlier step, which has a second number where a session was
        restored right there.
        """
        config = self._distillation
        if config is None or config.teacher is not None:
            return {None}
        if trained_at not in self._teachers_at:
            found: set[int | None] = set()
            number: int | None = trained_at
            step = None
            while number is not None and (version := self._tree.versions.get(number)) is not None:
                step = teacher_step(version.step, config.every) if step is None else step
                if version.step == step:
                    found.add(number)
                earlier = version.parent is not None and version.parent < number and version.step >= step
                number = version.parent if earlier else None
            self._teachers_at = {trained_at: found}
        return self._teachers_at[trained_at]


def check_batches(evidence: Evidence, tree: Tree) -> Iterator[Violation]:
    """Every step consumed a batch of the configured size, and only steps did."""
    size = evidence.config.training.groups_per_batch
    groups = dict(
        evidence.ledger.rows(
            "SELECT produced, COUNT(DISTINCT sequence) FROM episodes WHERE produced IS NOT NULL GROUP BY produced"
        )
    )
    for version in tree.versions.values():
        if version.was_lost:
            continue
        found = groups.get(version.number, 0)
        expected = size if tree.is_trained(version) else 0
        if found != expected:
            what = f"{found} groups were trained into it, and a batch has {expected}"
            yield Violation(LEDGER, f"version {version.number}", what)
