"""What happened to every episode, durably: admitted = trained + dropped (by reason) + in flight.

The controller tells a `Journal` what happens; the journal keeps the sums at every instant and hands the changes,
in order, to a `Store` that makes them durable away from the event loop. After a crash the file holds a prefix of
what was said, and `recover` closes its books: what was in flight is dropped, and so is what was trained into
weights that did not survive. Three orders make that enough:

    a step's episodes and its new version are durable  before  that version is published or checkpointed
    a version's number is durable                      before  any engine samples a token under it
    a checkpoint names a version that is durable, so the surviving weights' lineage is always in the file

The file also has each session's configuration and each checkpoint's digest: what `--resume` and `headrace audit`
hold the other files against.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.errors import DeadlineExceeded, LawBroken, RunFolderError
from headrace.records import Batch, WeightVersion

IN_FLIGHT, TRAINED, DROPPED = "in_flight", "trained", "dropped"

LOST_IN_CRASH = "lost_in_crash"
ORPHANED = "orphaned_by_restore"
LOST_WITH_LEDGER = "lost_with_ledger"
"""The ledger's rows about it are gone; its group's number is known from other files."""
WASTED = "attempt_begun_again"
"""Of tokens alone: their episode was begun again after its environment's process died."""

FORMAT = 2
"""SQLite's `user_version`. Raised with every change of the tables."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,      -- of the group, in the order of admission
    place INTEGER NOT NULL,         -- of the episode, in its group
    task TEXT NOT NULL,
    state TEXT NOT NULL,            -- in_flight | trained | dropped
    reason TEXT,                    -- of the drop
    tokens INTEGER NOT NULL DEFAULT 0,
    wasted INTEGER NOT NULL DEFAULT 0,  -- tokens of attempts that were begun again
    admitted_version INTEGER NOT NULL,
    version_min INTEGER,            -- of its tokens
    version_max INTEGER,
    trained_at INTEGER,             -- the trainer's version when it consumed the episode
    produced INTEGER,               -- the version that step made
    times_trained INTEGER NOT NULL DEFAULT 0,  -- epochs over it
    session INTEGER NOT NULL,
    teacher INTEGER                 -- in self-distillation: the version it was held against
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state, reason);
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY,
    parent INTEGER,
    step INTEGER NOT NULL,
    session INTEGER NOT NULL,
    orphaned INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY,
    started REAL NOT NULL,
    restored INTEGER,               -- version of the checkpoint it began from; NULL for the first
    config TEXT NOT NULL,           -- as resolved when it began: the text of config.toml
    finished INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS checkpoints (
    version INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    session INTEGER NOT NULL,
    digest TEXT NOT NULL            -- as its state.json has it
);
"""

Change = tuple[str, tuple[Any, ...]]
"""One statement and its values."""

_ADMIT = (
    "INSERT INTO episodes (id, group_id, sequence, place, task, state, admitted_version, session)"
    " VALUES (?, ?, ?, ?, ?, 'in_flight', ?, ?)"
)
_RECEIVE = "UPDATE episodes SET tokens = tokens + ? WHERE id = ?"
_WASTE = "UPDATE episodes SET tokens = tokens - ?, wasted = wasted + ? WHERE id = ?"
_DROP = "UPDATE episodes SET state = 'dropped', reason = ? WHERE id = ? AND state = 'in_flight'"
_TRAIN = (
    "UPDATE episodes SET state = 'trained', version_min = ?, version_max = ?, trained_at = ?, produced = ?,"
    " times_trained = times_trained + ?, teacher = ? WHERE id = ? AND state = 'in_flight'"
)
_VERSION = "INSERT INTO versions (number, parent, step, session) VALUES (?, ?, ?, ?)"
_SESSION = "INSERT INTO sessions (number, started, restored, config) VALUES (?, ?, ?, ?)"
_CHECKPOINT = "INSERT OR REPLACE INTO checkpoints (version, step, session, digest) VALUES (?, ?, ?, ?)"
_FINISH = "UPDATE sessions SET finished = 1 WHERE number = ?"


class Ledger:
    """The file. Synchronous; used by one thread at a time. RunFolderError where the file is not sound or the disk
    does not take what is written."""

    def __init__(self, path: str | Path, *, read_only: bool = False):
        """Read-only it is seen as it was when it was opened, whatever a run adds meanwhile."""
        self.path = Path(path)
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        if read_only and not self.path.is_file():
            raise RunFolderError(
                "a run has a ledger, and this one has lost it",
                str(path),
                "restore it and the file ledger.sqlite-wal from a copy, or begin a new run",
            )
        with self._told("open"):
            self._db = self._open_to_read() if read_only else self._open_to_write()

    def _open_to_write(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            db.execute(f"PRAGMA user_version = {FORMAT}")
        self._check_format(db)
        db.executescript(_SCHEMA)
        return db

    def _open_to_read(self) -> sqlite3.Connection:
        try:
            db = _connect_to_read(self.path)
        except sqlite3.OperationalError:
            # Where nothing can be written beside the file SQLite does not read its -wal: so a copy is read.
            self._copy = tempfile.TemporaryDirectory(prefix="headrace-ledger-")
            copy = Path(self._copy.name) / self.path.name
            for suffix in ("", "-wal"):
                if (part := self.path.with_name(self.path.name + suffix)).is_file():
                    shutil.copyfile(part, f"{copy}{suffix}")
            db = _connect_to_read(copy)
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'sessions'").fetchone():
            raise RunFolderError(
                "a ledger has its tables, and this one is empty: what it held is lost, with its -wal file perhaps",
                str(self.path),
                "restore it and the file ledger.sqlite-wal from a copy, or begin a new run",
            )
        self._check_format(db)
        return db

    def _check_format(self, db: sqlite3.Connection) -> None:
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found != FORMAT:
            raise RunFolderError(
                f"this Headrace reads ledgers of format {FORMAT}, and this one is of format {found}",
                str(self.path),
                "use the Headrace that made the run",
            )

    def check_sound(self) -> None:
        """Raise RunFolderError where pages of the file are damaged. Reads all of it."""
        found = [row[0] for row in self.query("PRAGMA integrity_check(3)")]
        if found != ["ok"]:
            raise self._unsound("; ".join(found))

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Errors of SQLite as ours. What breaks a rule of the tables is a bug and stays what it is."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise
        except sqlite3.OperationalError as error:
            raise RunFolderError(
                f"the ledger can be used, and SQLite could not {what} it: {error}",
                str(self.path),
                "look at the disk's free space and the file's permissions; then --resume goes on",
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._unsound(str(error)) from error

    def _unsound(self, why: str) -> RunFolderError:
        return RunFolderError(
            f"a run's ledger is a sound SQLite file, and this one is damaged: {' '.join(why.split())}",
            str(self.path),
            "restore it and the file ledger.sqlite-wal from a copy, or begin a new run",
        )

    def apply(self, changes: Sequence[Change]) -> None:
        """Make changes durable, all or none. A change that finds no row in the right state breaks law 3."""
        with self._told("write"), self._transaction():
            for statement, values in changes:
                done = self._db.execute(statement, values)
                if done.rowcount != 1:
                    raise LawBroken(
                        "ledger", str(values[-1]), f"no episode in flight for: {statement.split(' WHERE')[0]}"
                    )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or none."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A failed commit may have ended the transaction itself.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def recover(self, restored: int | None, config: str = "", lost: Lost | None = None) -> int:
        """Close the books of a session that ended without doing so; returns the next session's number.

        `restored` is the version the surviving weights have. Versions outside its lineage are orphaned, and
        with them what was trained into them. `config` is the text of the new session's configuration. `lost` are
        numbers that were given out and that the file has no rows of, since it is older than what stands beside it.
        """
        with self._told("write"), self._transaction():
            return self._recover(restored, config, lost)

    def _recover(self, restored: int | None, config: str, lost: Lost | None) -> int:
        db = self._db
        db.execute("UPDATE episodes SET state = 'dropped', reason = ? WHERE state = 'in_flight'", (LOST_IN_CRASH,))
        lineage = self.lineage(restored)
        for (number,) in db.execute("SELECT number FROM versions WHERE orphaned = 0").fetchall():
            if number not in lineage:
                db.execute("UPDATE versions SET orphaned = 1 WHERE number = ?", (number,))
        db.execute(
            "UPDATE episodes SET state = 'dropped', reason = ? WHERE state = 'trained'"
            # Also where the version's own row is lost.
            " AND produced NOT IN (SELECT number FROM versions WHERE orphaned = 0)",
            (ORPHANED,),
        )
        if lost is not None:
            self._book_lost(lost, restored)
        (session,) = db.execute("SELECT COALESCE(MAX(number), 0) + 1 FROM sessions").fetchone()
        db.execute(_SESSION, (session, time.time(), restored, config))
        return int(session)

    def _book_lost(self, lost: Lost, restored: int | None) -> None:
        """Rows for what the file does not know of, so that no number is given out again and the sums say so."""
        (session, sequence, number) = self._db.execute(
            "SELECT (SELECT MAX(number) FROM sessions), (SELECT COALESCE(MAX(sequence), -1) FROM episodes),"
            " (SELECT COALESCE(MAX(number), -1) FROM versions)"
        ).fetchone()
        for missing in range(number + 1, lost.versions):
            self._db.execute(
                "INSERT INTO versions (number, parent, step, session, orphaned) VALUES (?, ?, 0, ?, 1)",
                (missing, restored, session),
            )
        (admitted,) = self._db.execute("SELECT COALESCE(MAX(admitted_version), 0) FROM episodes").fetchone()
        for missing in range(sequence + 1, lost.sequences):
            for place in range(lost.group_size):
                group = group_name(missing)
                name = episode_name(group, place)
                self._db.execute(_ADMIT, (name, group, missing, place, "", admitted, session))
                self._db.execute(_DROP, (LOST_WITH_LEDGER, name))
        for missing in range(session + 1, lost.sessions):
            self._db.execute(_SESSION, (missing, time.time(), restored, ""))

    def restored_from(self, version: int, digest: str) -> None:
        """A checkpoint that a session begins from is on record, also where the run died before it was noted."""
        with self._told("write"):
            self._db.execute(
                "INSERT OR IGNORE INTO checkpoints (version, step, session, digest)"
                " SELECT number, step, session, ? FROM versions WHERE number = ?",
                (digest, version),
            )

    def lineage(self, version: int | None) -> set[int]:
        """The version and all its ancestors."""
        parents = dict(self._db.execute("SELECT number, parent FROM versions"))
        found: set[int] = set()
        while version is not None and version in parents and version not in found:
            found.add(version)
            version = parents[version]
        return found

    def sums(self) -> dict[str, Any]:
        """The ledger's sums over episodes and over tokens."""
        rows = self.query(
            "SELECT state, reason, COUNT(*), SUM(tokens), SUM(wasted) FROM episodes GROUP BY state, reason"
        )
        episodes, tokens = _Sums(), _Sums()
        for state, reason, count, token_count, wasted in rows:
            episodes.add(state, reason, count)
            tokens.add(state, reason, token_count)
            if wasted:
                tokens.add(DROPPED, WASTED, wasted)
        return {**episodes.as_dict(), "tokens": tokens.as_dict()}

    def next_version(self) -> int:
        return int(self.query("SELECT COALESCE(MAX(number), -1) + 1 FROM versions")[0][0])

    def next_sequence(self) -> int:
        return int(self.query("SELECT COALESCE(MAX(sequence), -1) + 1 FROM episodes")[0][0])

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return list(self.rows(sql, values))

    def rows(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The same one row after another, in little memory."""
        with self._told("read"):
            # An iterator of its own: `yield from` would close the cursor, also where the file was closed before.
            yield from iter(self._db.execute(sql, values).fetchone, None)

    def close(self) -> None:
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()


def _connect_to_read(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    # The first read fixes what all later ones see.
    db.execute("BEGIN")
    db.execute("SELECT COUNT(*) FROM sqlite_master")
    return db


class Lost(NamedTuple):
    """Numbers below these have been given out, whether the ledger knows of them or not."""

    versions: int
    sequences: int
    sessions: int
    group_size: int


def group_name(sequence: int) -> str:
    """A group's id by its place in the order of admission."""
    return f"g{sequence:07d}"


def episode_name(group: str, place: int) -> str:
    """An episode's id by its place in its group."""
    return f"{group}/{place}"


class _Sums:
    def __init__(self) -> None:
        self.admitted = self.trained = self.in_flight = 0
        self.dropped: Counter[str] = Counter()

    def add(self, state: str, reason: str | None, count: int) -> None:
        self.admitted += count
        if state == TRAINED:
            self.trained += count
        elif state == DROPPED:
            self.dropped[reason or "unknown"] += count
        else:
            self.in_flight += count

    def as_dict(self) -> dict[str, Any]:
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "in_flight": self.in_flight,
            "dropped": dict(sorted(self.dropped.items())),
        }


class Store(Protocol):
    """Makes changes durable away from the event loop, in order."""

    async def apply(self, changes: Sequence[Change]) -> None: ...


class Journal:
    """The controller's side: sums at every instant, changes on their way to the store."""

    def __init__(self, store: Store, *, session: int, deadline_s: float = 60.0):
        self._store = store
        self._deadline_s = deadline_s
        self._session = session
        self._tokens: dict[str, int] = {}
        self._pending: list[Change] = []
        self._last_write: asyncio.Future[None] | None = None
        self.admitted = self.trained = 0
        self.tokens_received = self.tokens_trained = 0
        self.dropped: Counter[str] = Counter()
        self.tokens_dropped = 0

    @property
    def in_flight(self) -> int:
        return len(self._tokens)

    def admit(self, group_id: str, sequence: int, task: str, version: int, episodes: Sequence[str]) -> None:
        for place, episode in enumerate(episodes):
            self._tokens[episode] = 0
            self._pending.append((_ADMIT, (episode, group_id, sequence, place, task, version, self._session)))
        self.admitted += len(episodes)

    def receive(self, episode: str, tokens: int) -> None:
        """Tokens of an episode have arrived from an engine."""
        if episode in self._tokens:
            self._tokens[episode] += tokens
            self.tokens_received += tokens
            self._pending.append((_RECEIVE, (tokens, episode)))

    def waste(self, episode: str, tokens: int) -> None:
        """Tokens received for an episode will not be part of it."""
        if tokens and episode in self._tokens:
            self._tokens[episode] -= tokens
            self.tokens_dropped += tokens
            self._pending.append((_WASTE, (tokens, tokens, episode)))

    def drop(self, episode: str, reason: str) -> None:
        self.tokens_dropped += self._leave(episode)
        self.dropped[reason] += 1
        self._pending.append((_DROP, (reason, episode)))

    def train(self, batch: Batch, produced: WeightVersion, times: int = 1, teacher: int | None = None) -> None:
        """A step consumed the batch, training on it so many times, and made a version: one change, so that both are
        durable or neither. `teacher` is the version that the policy learned from."""
        for episode in batch.episodes:
            self.tokens_trained += self._leave(episode.id)
            self.trained += 1
            versions = (episode.version_min, episode.version_max)
            self._pending.append((_TRAIN, (*versions, batch.version, produced.number, times, teacher, episode.id)))
        self.version(produced)

    def version(self, version: WeightVersion) -> None:
        self._pending.append((_VERSION, (version.number, version.parent, version.step, self._session)))

    def checkpoint(self, version: WeightVersion, digest: str) -> None:
        """A checkpoint of this version is on the disk."""
        self._pending.append((_CHECKPOINT, (version.number, version.step, self._session, digest)))

    def finish(self) -> None:
        self._pending.append((_FINISH, (self._session,)))

    async def flush(self) -> None:
        """Return when everything said so far is durable. Cancelling the wait does not cancel the writing."""
        if self._pending:
            changes, self._pending = self._pending, []
            self._last_write = asyncio.ensure_future(self._write(changes, self._last_write))
        if self._last_write is None:
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.shield(self._last_write)
        except TimeoutError:
            look_at = "the disk that holds the run's folder, or limits.commit_s"
            raise DeadlineExceeded("the controller", "the ledger's commit", self._deadline_s, look_at) from None

    async def _write(self, changes: Sequence[Change], before: asyncio.Future[None] | None) -> None:
        if before is not None:
            await before
        await self._store.apply(changes)

    def check(self) -> None:
        """Law 3, at this instant."""
        if self.admitted != self.trained + sum(self.dropped.values()) + self.in_flight:
            raise LawBroken("ledger", "journal", f"{self.sums()}")
        if self.tokens_received != self.tokens_trained + self.tokens_dropped + sum(self._tokens.values()):
            raise LawBroken("ledger", "journal", f"tokens: {self.sums()}")

    def sums(self) -> dict[str, Any]:
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "in_flight": self.in_flight,
            "dropped": dict(sorted(self.dropped.items())),
        }

    def _leave(self, episode: str) -> int:
        if episode not in self._tokens:
            raise LawBroken("ledger", episode, "an episode leaves once, trained or dropped")
        return self._tokens.pop(episode)
