"""events.jsonl against the ledger: sessions, published versions, drops, checkpoints, and what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.audit.evidence import Evidence
from headrace.audit.findings import CORRUPTION, LEDGER, PROVENANCE, RECORDS, SWAP, Findings, some
from headrace.audit.turns import engine_names
from headrace.audit.versions import Tree
from headrace.ledger import DROPPED, IN_FLIGHT, LOST_IN_CRASH
from headrace.telemetry.evaluations import contradiction, sets_of
from headrace.telemetry.folder import file_digest

_LONGEST_START_S = 3600.0
"""Between a session's row in the ledger and its first event."""
_OF_THE_RUN = ("group_below_minimum", "equal_rewards", "run_finished", "shutdown", LOST_IN_CRASH)
"""Reasons that no episode gave itself."""


@dataclass
class Published:
    """What the events say of versions: the digest of each that was published."""

    checksums: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    """Versions whose weights were kept for the audit."""
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Of each its session and what it said, as summaries have it."""


def check_events(evidence: Evidence, tree: Tree, findings: Findings) -> Published:
    """All events, in the order they were written."""
    reader = _Reader(evidence, tree, findings)
    for event in evidence.events():
        kind = event.get("kind")
        if not isinstance(kind, str):
            findings.add(RECORDS, "events.jsonl", f"an event without a kind: {str(event)[:80]}")
            continue
        look = getattr(reader, f"see_{kind}", None)
        if look is not None:
            try:
                look(event)
            except (KeyError, TypeError, AttributeError) as error:
                findings.add(RECORDS, "events.jsonl", f"an event {kind!r} lacks what such have: {error}")
        findings.checked["events"] += 1
    reader.finish()
    return reader.published


class _Reader:
    def __init__(self, evidence: Evidence, tree: Tree, findings: Findings):
        self._evidence, self._tree, self._findings = evidence, tree, findings
        self._sessions = {session.number: session for session in tree.sessions}
        self._engines = {*engine_names(evidence.config.engine.count), "engine-eval"}
        self._session = 0
        self._newest = -1
        """Published in this session."""
        self._last_published: dict[int, int] = {}
        self._recorded = 0
        self._dropped: Counter[int] = Counter()
        """Episodes, by session, that the events tell of."""
        self._dropped_groups: Counter[int] = Counter()
        self._stored: dict[int, tuple[str, int]] = {}
        """Of each step the digest of its file and the episodes in it, as written last."""
        self._checkpoints: Counter[tuple[int, int, int]] = Counter()
        """Session, version and step of each that the events tell of."""
        self.published = Published()

    # ── What events say ──────────────────────────────────────────────────────────────────────────────────

    def see_started(self, event: dict[str, Any]) -> None:
        number, step, version = event["session"], event["step"], event["version"]
        where = f"session {number}"
        if number <= self._session or number not in self._sessions:
            self._findings.add(LEDGER, where, f"it started after session {self._session}; the ledger has no such")
        known = self._tree.versions.get(version)
        if known is not None and known.step != step and not known.was_lost:
            self._findings.add(LEDGER, where, f"it started with version {version} at step {step}, not {known.step}")
        session = self._sessions.get(number)
        if session is not None and abs(event["time"] - session.started) > _LONGEST_START_S:
            self._findings.add(RECORDS, where, "the ledger and the events have it begin at different times")
        if (
            session is not None
            and session.finished
            and known is not None
            and version not in (session.restored, self._tree.first_of.get(number))
        ):
            self._findings.add(LEDGER, where, f"it started with version {version}, which is not its first")
        self._session, self._newest = number, -1

    def see_published(self, event: dict[str, Any]) -> None:
        number, checksum = event["version"], event["checksum"]
        where = f"version {number}"
        known = self._tree.versions.get(number)
        if known is None:
            self._findings.add(LEDGER, where, "published without being in the ledger")
        elif known.step != event["step"] and not known.was_lost:
            self._findings.add(
                LEDGER, where, f"published as of step {event['step']}, in the ledger of {known.step}"
            )
        before = self.published.checksums.setdefault(number, checksum)
        if before != checksum:
            self._findings.add(SWAP, where, "different sets of weights were published under it")
        if strangers := {*event.get("engines", ()), *event.get("served", ())} - self._engines:
            self._findings.add(SWAP, where, f"published to {sorted(strangers)}, which the run does not have")
        for engine, served in event.get("served", {}).items():
            if served != checksum:
                self._findings.add(SWAP, where, f"{engine} served other bytes than were published")
        if number < self._newest:
            self._findings.add(SWAP, where, f"published after version {self._newest}")
        self._newest = max(self._newest, number)
        self._last_published[self._session] = self._newest

    def see_published_in_part(self, event: dict[str, Any]) -> None:
        """Some engines had taken it when the trainer went on to a later one."""
        self.see_published(event)

    def see_kept(self, event: dict[str, Any]) -> None:
        self.published.kept.add(event["version"])

    def see_dropped(self, event: dict[str, Any]) -> None:
        name, reason = event["episode"], event["reason"]
        rows = self._evidence.ledger.query("SELECT state, reason, session FROM episodes WHERE id = ?", (name,))
        self._dropped[self._session] += 1
        if not rows:
            if not self._crashed(self._session):
                self._findings.add(LEDGER, name, f"dropped ({reason}) by the events, and not in the ledger")
            return
        state, said, session = rows[0]
        # A session that crashed may have lost the ledger's row: it stands as lost, or another has its name now.
        forgotten = session != self._session or said == LOST_IN_CRASH or state == IN_FLIGHT
        if said == reason or (forgotten and self._crashed(self._session)):
            return
        self._findings.add(LEDGER, name, f"dropped ({reason}) by the events, in the ledger {state} ({said})")

    def see_group_dropped(self, event: dict[str, Any]) -> None:
        self._dropped_groups[self._session] += 1

    def see_evaluated(self, event: dict[str, Any]) -> None:
        number, step = event["version"], event["step"]
        known, where = self._tree.versions.get(number), f"version {number}"
        if known is None and not self._crashed(self._session):
            self._findings.add(LEDGER, where, "evaluated, and not in the ledger")
        elif known is not None and known.step != step and not known.was_lost:
            self._findings.add(LEDGER, where, f"evaluated as of step {step}, in the ledger of {known.step}")
        if (event["pass_1"] is None or not event.get("valid", True)) and event["best"]:
            self._findings.add(RECORDS, where, "an evaluation that is not valid chose it as the best")
        for name, line in sets_of(event).items():
            if what := contradiction(line):
                self._findings.add(RECORDS, f"the evaluation of {name} at step {step}", what)
        found = {name: value for name, value in event.items() if name not in ("kind", "time", "best")}
        self.published.evaluations.append((self._session, found))

    def see_checkpoint(self, event: dict[str, Any]) -> None:
        number, step = event["version"], event["step"]
        known = self._tree.versions.get(number)
        if known is None or (known.step != step and not known.was_lost):
            has = "no such version" if known is None else f"it at step {known.step}"
            self._findings.add(
                LEDGER, f"version {number}", f"checkpointed at step {step}, and the ledger has {has}"
            )
        self._checkpoints[self._session, number, step] += 1

    def see_teacher(self, event: dict[str, Any]) -> None:
        if event["version"] is not None and event["version"] not in self._tree.versions:
            self._findings.add(LEDGER, f"version {event['version']}", "it taught, and is not in the ledger")

    def see_stored(self, event: dict[str, Any]) -> None:
        self._stored[event["step"]] = event["digest"], event["episodes"]

    def see_recorded(self, event: dict[str, Any]) -> None:
        """At the end of a session: how much was trained on in it, and how much of that written."""
        rows = self._evidence.ledger.query(
            "SELECT COUNT(*), COUNT(DISTINCT sequence) FROM episodes"
            " WHERE produced IN (SELECT number FROM versions WHERE session = ?)",
            (self._session,),
        )[0]
        said = event.get("episodes_trained", 0), event.get("groups_trained", 0)
        if said != rows and not self._crashed(self._session):
            what = f"{said} episodes and groups were trained by the events, {rows} by the ledger"
            self._findings.add(LEDGER, f"session {self._session}", what)
        self._recorded = self._session

    # ── What they should have said ───────────────────────────────────────────────────────────────────────

    def finish(self) -> None:
        for number, session in self._sessions.items():
            if session.finished and number not in self._last_published and session.config:
                self._findings.add(RECORDS, f"session {number}", "events.jsonl has no version published in it")
            if session.finished and self._recorded < number == max(self._sessions):
                self._findings.add(RECORDS, f"session {number}", "events.jsonl does not have its end")
        self._check_sampled()
        self._check_drops()
        self._check_checkpoints()
        self._check_files()

    def _check_sampled(self) -> None:
        """What tokens were sampled under was published, unless a crash took the event."""
        query = "SELECT version_min, version_max FROM episodes WHERE produced IS NOT NULL"
        sampled = {v for row in self._evidence.ledger.rows(f"{query} GROUP BY 1, 2") for v in row if v is not None}
        missing = {
            number
            for number in sampled - self.published.checksums.keys()
            if number in self._tree.versions and not self._may_be_lost(number)
        }
        if missing:
            self._findings.add(PROVENANCE, "events.jsonl", f"tokens of versions never published: {some(missing)}")

    def _may_be_lost(self, number: int) -> bool:
        """At a session's end a version may be on its way: engines sample under it, and no event tells of it yet."""
        session = self._tree.versions[number].session
        return number > self._last_published.get(session, -1)

    def _check_drops(self) -> None:
        """A session that ended in order told of each failure in groups that had ended by then, and of each group
        that was dropped whole."""
        for number, session in self._sessions.items():
            if not session.finished or not session.config:
                continue
            marks = ", ".join("?" * len(_OF_THE_RUN))
            failed = self._evidence.ledger.query(
                f"SELECT COUNT(*) FROM episodes WHERE session = ? AND state = ? AND reason NOT IN ({marks})"
                " AND produced IS NULL AND sequence NOT IN"
                " (SELECT sequence FROM episodes WHERE reason IN ('run_finished', 'shutdown'))",
                (number, DROPPED, *_OF_THE_RUN),
            )[0][0]
            if self._dropped[number] != failed:
                what = f"{self._dropped[number]} failed episodes by the events, {failed} by the ledger"
                self._findings.add(LEDGER, f"session {number}", what)
            groups = self._evidence.ledger.query(
                "SELECT COUNT(*) FROM (SELECT sequence FROM episodes WHERE session = ? GROUP BY sequence"
                " HAVING SUM(state <> ?) = 0 AND SUM(produced IS NOT NULL) = 0"
                " AND SUM(reason IN ('run_finished', 'shutdown')) = 0)",
                (number, DROPPED),
            )[0][0]
            if self._dropped_groups[number] != groups:
                what = f"{self._dropped_groups[number]} groups were dropped by the events, {groups} by the ledger"
                self._findings.add(LEDGER, f"session {number}", what)

    def _check_checkpoints(self) -> None:
        """A session that ended in order told of each checkpoint. The ledger has each once, with the last session
        that wrote it."""
        rows = {
            (session, version, step)
            for session, version, step in self._evidence.ledger.rows(
                "SELECT session, version, step FROM checkpoints"
            )
        }
        versions = {version for _, version, _ in rows}
        for number, version, step in sorted(rows):
            session = self._sessions.get(number)
            if session is None:
                what = f"checkpointed in session {number}, which is not in the ledger"
                self._findings.add(LEDGER, f"version {version}", what)
            elif session.finished and session.config and not self._checkpoints[number, version, step]:
                what = f"checkpointed at step {step} in session {number}, whose events do not tell of it"
                self._findings.add(LEDGER, f"version {version}", what)
        for number, version, step in sorted(self._checkpoints):
            if version not in versions and not self._crashed(number):
                what = f"checkpointed at step {step} by the events, and the ledger has no such checkpoint"
                self._findings.add(LEDGER, f"version {version}", what)

    def _check_files(self) -> None:
        """The bytes of stored steps, and how many episodes of them were written."""
        for stored in self._evidence.steps:
            if stored.file is None or stored.step not in self._stored:
                continue
            digest, _ = self._stored[stored.step]
            self._findings.checked["digests"] += 1
            if file_digest(stored.file) != digest:
                self._findings.add(CORRUPTION, stored.where, "its bytes are not those that were written")

    def _crashed(self, number: int) -> bool:
        session = self._sessions.get(number)
        return session is None or not session.finished


def check_digests(evidence: Evidence, summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(file, what) where the files that a finished run's summary names have other bytes."""
    assert evidence.folder is not None
    for name, digest in summary.get("digests", {}).items():
        file = evidence.folder.path / name
        if file.is_file() and file_digest(file) != digest:
            yield name, "its bytes are not those that the run ended with"
