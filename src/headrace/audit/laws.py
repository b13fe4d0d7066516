"""Laws 1 to 4 on what a run left behind, as functions of the ledger, the stored episodes and the events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.ledger import DROPPED, IN_FLIGHT, TRAINED, Ledger
from headrace.records import Episode, Turn


class Violation(NamedTuple):
    """One place where a law does not hold."""

    law: str
    where: str
    what: str


class Trained(Protocol):
    """A trained episode as it was stored."""

    @property
    def episode(self) -> Episode: ...

    @property
    def trained_version(self) -> int: ...

    @property
    def produced_version(self) -> int: ...


PROVENANCE, STALENESS, LEDGER, SWAP = "provenance", "staleness bound", "ledger", "atomic swap"


def check_laws(
    ledger: Ledger,
    stored: Iterable[Trained],
    events: Iterable[dict[str, Any]],
    *,
    bound: int | None,
    group_size: int,
    epochs: int = 1,
) -> Iterator[Violation]:
    """Everything that can be known without the weights. `headrace audit --recompute` adds what cannot."""
    yield from check_versions(ledger, events)
    yield from check_books(ledger, group_size=group_size, epochs=epochs)
    yield from check_staleness(ledger, bound=bound)
    yield from check_stored(ledger, stored, bound=bound)


def check_versions(ledger: Ledger, events: Iterable[dict[str, Any]]) -> Iterator[Violation]:
    """A number names one set of weights for ever, and its parent came before it."""
    parents = dict(ledger.query("SELECT number, parent FROM versions"))
    for number, parent in parents.items():
        if parent is not None and (parent >= number or parent not in parents):
            yield Violation(LEDGER, f"version {number}", f"its parent {parent} is not an earlier version")
    checksums: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if event["kind"] == "published":
            checksums[event["version"]].add(event["checksum"])
            if event["version"] not in parents:
                yield Violation(LEDGER, f"version {event['version']}", "published without being in the ledger")
    for number, seen in checksums.items():
        if len(seen) > 1:
            yield Violation(
                SWAP, f"version {number}", f"{len(seen)} different sets of weights were published under it"
            )


def check_books(ledger: Ledger, *, group_size: int, epochs: int) -> Iterator[Violation]:
    """admitted = trained + dropped + in flight, and no row is missing, doubled or in a state it cannot be in."""
    places: dict[int, list[int]] = defaultdict(list)
    for sequence, place in ledger.query("SELECT sequence, place FROM episodes"):
        places[sequence].append(place)
    for sequence in range(max(places, default=-1) + 1):
        if sorted(places[sequence]) != list(range(group_size)):
            yield Violation(
                LEDGER, f"group {sequence}", f"its episodes are {sorted(places[sequence])} of {group_size}"
            )
    finished = {number for (number,) in ledger.query("SELECT number FROM sessions WHERE finished = 1")}
    last = ledger.query("SELECT COALESCE(MAX(number), 0) FROM sessions")[0][0]
    surviving = ledger.lineage(_surviving(ledger))
    rows = ledger.query("SELECT id, state, reason, produced, times_trained, session FROM episodes")
    for name, state, reason, produced, times, session in rows:
        if state == IN_FLIGHT and (session in finished or session != last):
            yield Violation(LEDGER, name, f"in flight, though session {session} has ended")
        elif state == DROPPED and not reason:
            yield Violation(LEDGER, name, "dropped without a reason")
        elif state == TRAINED and (times != epochs or produced not in surviving):
            yield Violation(LEDGER, name, f"trained {times} times of {epochs}, into version {produced}")
    trained = {p for (p,) in ledger.query("SELECT DISTINCT produced FROM episodes WHERE state = 'trained'")}
    for number, parent, session, step in ledger.query("SELECT number, parent, session, step FROM versions"):
        restored = ledger.query("SELECT restored FROM sessions WHERE number = ?", (session,))
        began = bool(restored) and restored[0][0] == parent and _first_of(ledger, session) == number
        if number in surviving and number not in trained and not began and step > 0:
            yield Violation(LEDGER, f"version {number}", "no episode was trained into it")


def _first_of(ledger: Ledger, session: int) -> int | None:
    return ledger.query("SELECT MIN(number) FROM versions WHERE session = ?", (session,))[0][0]


def _surviving(ledger: Ledger) -> int | None:
    """The newest version that no restore orphaned."""
    return ledger.query("SELECT MAX(number) FROM versions WHERE orphaned = 0")[0][0]


def check_staleness(ledger: Ledger, *, bound: int | None) -> Iterator[Violation]:
    rows = ledger.query(
        "SELECT id, admitted_version, version_min, version_max, trained_at FROM episodes WHERE state = 'trained'"
    )
    for name, admitted, low, high, trained_at in rows:
        if low is None or not admitted <= low <= high <= trained_at:
            what = f"admitted at {admitted}, tokens of versions {low} to {high}, trained at {trained_at}"
            yield Violation(STALENESS, name, what)
        elif bound is not None and trained_at - low > bound:
            yield Violation(STALENESS, name, f"a token of version {low} was trained at {trained_at}, bound {bound}")


def check_stored(ledger: Ledger, stored: Iterable[Trained], *, bound: int | None) -> Iterator[Violation]:
    """Each stored episode against the ledger's row and against itself."""
    versions = {number for (number,) in ledger.query("SELECT number FROM versions")}
    columns = "state, version_min, version_max, trained_at, produced, tokens"
    rows = {row[0]: row[1:] for row in ledger.query(f"SELECT id, {columns} FROM episodes")}
    for item in stored:
        episode = item.episode
        if item.produced_version not in versions:
            continue  # its step was not durable yet when the run crashed
        if episode.id not in rows:
            yield Violation(LEDGER, episode.id, "trained, but not in the ledger")
            continue
        state, low, high, trained_at, produced, tokens = rows[episode.id]
        if produced != item.produced_version:
            continue  # trained into weights that a restore orphaned; the row belongs to what came after
        kept = (episode.version_min, episode.version_max, item.trained_version)
        if state == TRAINED and (kept != (low, high, trained_at) or tokens != episode.num_tokens):
            what = (
                f"stored: {kept}, {episode.num_tokens} tokens; in the ledger: {(low, high, trained_at)}, {tokens}"
            )
            yield Violation(LEDGER, episode.id, what)
        if state not in (TRAINED, DROPPED):
            yield Violation(LEDGER, episode.id, f"trained, but {state} in the ledger")
        for index, turn in enumerate(episode.turns):
            context = len(episode.full_context(index))
            problems = turn_problems(turn, context, known=versions, trained_at=item.trained_version, bound=bound)
            for law, problem in problems:
                yield Violation(law, f"{episode.id} turn {index}", problem)


def turn_problems(
    turn: Turn, context: int, *, known: set[int], trained_at: int, bound: int | None
) -> Iterator[tuple[str, str]]:
    """(law, what) for whatever a turn's own columns contradict."""
    if not len(turn.tokens):
        return
    versions = turn.versions
    if not set(versions.tolist()) <= known:
        yield PROVENANCE, f"tokens of unknown versions {sorted(set(versions.tolist()) - known)}"
    if bound is not None and trained_at - int(versions.min()) > bound:
        yield STALENESS, f"a token of version {versions.min()} was trained at {trained_at}, bound {bound}"
    if not np.isfinite(turn.logprobs).all() or (turn.logprobs > 1e-4).any():
        yield PROVENANCE, "a log-prob is not a log-probability"
    if not turn.lineage or turn.lineage[0].position != 0:
        yield PROVENANCE, "the KV lineage does not begin at position 0"
        return
    positions = np.asarray([event.position for event in turn.lineage])
    lineage = np.asarray([event.version for event in turn.lineage])
    computed = lineage[np.searchsorted(positions, context - 1 + np.arange(len(versions)), side="right") - 1]
    if (positions[1:] < positions[:-1]).any() or (computed != versions).any():
        yield PROVENANCE, f"token versions {versions.tolist()} do not follow from the lineage {lineage.tolist()}"
    if turn.sampling.truncates and turn.support is None:
        yield PROVENANCE, "sampling was truncated and its support is missing"
    if turn.support is not None:
        for t, token in enumerate(turn.tokens.tolist()):
            row = turn.support.row(t)
            if len(row) and token not in row:
                yield PROVENANCE, f"token {t} is not in its own support"
                return
