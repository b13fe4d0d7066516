"""What a run that is resumed must show first: its ledger, its checkpoints, its events and its episodes agree.

    ledger.sqlite     sound, and not older than what stands beside it: every version that was published is in it
    checkpoints/      the newest that the ledger knows is there, whole, and is of the ledger's version and step
    episodes/         the last stored step before it is in the ledger, episode by episode

Where they do not, resuming is refused with what disagrees and with the newest older state that would do, which
`--from STEP` then takes. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import InputError, RunFolderError
from headrace.ledger import Ledger, Lost
from headrace.orchestration.vault import checkpoint_steps
from headrace.telemetry.folder import RunFolder, read_lines
from headrace.training.checkpoint_state import read_state


@dataclass(frozen=True)
class Standing:
    """What a session goes on from."""

    checkpoint: Path | None = None
    """None: the model that the run began with."""
    digest: str = ""
    """The checkpoint's."""
    lost: Lost | None = None
    """What the ledger has no rows of, where it is older than the files beside it."""


def inspect_run(run: RunFolder, *, group_size: int, from_step: int | None = None) -> Standing:
    """What to resume from: the newest checkpoint, or that of `from_step` (0: the model that the run began with).

    RunFolderError where the run's files do not agree on it.
    """
    if not _has_happened(run):
        return Standing()
    ledger = Ledger(run.ledger, read_only=True)
    try:
        ledger.check_sound()
        return _Inspection(run, ledger, group_size).standing(from_step)
    finally:
        ledger.close()


def _has_happened(run: RunFolder) -> bool:
    """Whether the run was more than started: a process killed while it starts leaves nothing to resume from."""
    stored = bool(run.step_files()) or bool(checkpoint_steps(run.path))
    if stored or run.metrics.is_file() or any(event.get("kind") == "started" for event in read_lines(run.events)):
        return True
    try:
        ledger = Ledger(run.ledger, read_only=True)
    except RunFolderError:
        return False
    begun = bool(ledger.query("SELECT 1 FROM sessions"))
    ledger.close()
    return begun


class _Inspection:
    def __init__(self, run: RunFolder, ledger: Ledger, group_size: int):
        self._run = run
        self._ledger = ledger
        self._group_size = group_size

    def standing(self, from_step: int | None) -> Standing:
        # A damaged line is told now, and not once all processes have started.
        for number, line in enumerate(read_lines(self._run.metrics), start=1):
            if not isinstance(line.get("step"), int):
                raise RunFolderError(
                    f"{self._run.metrics}, line {number} names its step",
                    line.get("step"),
                    "the file is damaged: restore it",
                )
        found = dict(self._checkpoints())
        sound = [step for step, problem in found.items() if problem is None]
        lost = self._lost()
        if from_step is None:
            problems = [] if lost is None else [_older(self._ledger, lost)]
            newest = self._newest_known()
            if newest is not None and newest not in found:
                problems.append(f"{self._path(newest)}, which the ledger has, is missing")
            if found and (problem := found[max(found)]) is not None:
                problems.append(problem)
            if problems:
                raise RunFolderError(
                    f"a run is resumed from what its files agree on: {'; '.join(problems)}",
                    str(self._run.path),
                    f"restore what is damaged or missing from a copy, or {_way_out(sound)}",
                )
            chosen = max(found, default=0)
        else:
            chosen = from_step
            if chosen and chosen not in sound:
                why = found.get(chosen) or f"{self._path(chosen)} is not there"
                raise RunFolderError(
                    f"--from names the step of a sound checkpoint: {why}", from_step, _way_out(sound)
                )
        self._check_episodes(chosen)
        if not chosen:
            return Standing(lost=lost)
        folder = self._path(chosen)
        return Standing(folder, read_state(folder)["digest"], lost)

    def _path(self, step: int) -> Path:
        return checkpoint_steps(self._run.path).get(step, self._run.checkpoints / f"step-{step:06d}")

    def _newest_known(self) -> int | None:
        """Step of the newest checkpoint that was written, as the ledger has it."""
        found = self._ledger.query(
            "SELECT c.step FROM checkpoints c JOIN versions v ON v.number = c.version WHERE v.orphaned = 0"
            " ORDER BY c.version DESC LIMIT 1"
        )
        return found[0][0] if found else None

    def _checkpoints(self) -> Iterator[tuple[int, str | None]]:
        """(step, what is wrong with it) of those on the disk, oldest first."""
        for step, folder in checkpoint_steps(self._run.path).items():
            try:
                yield step, self._disagreement(step, folder, read_state(folder))
            except InputError as error:
                yield step, f"{folder}: {error.rule}"

    def _disagreement(self, step: int, folder: Path, state: dict[str, Any]) -> str | None:
        version = state["version"]
        inner = state["state"]
        if not step == state["step"] == inner.get("step") or version != inner.get("version"):
            said = f"steps {state['step']} and {inner.get('step')}, versions {version} and {inner.get('version')}"
            return f"{folder} says that it is of {said}"
        rows = self._ledger.query("SELECT step, orphaned FROM versions WHERE number = ?", (version,))
        if not rows:
            return f"{folder} is of version {version}, which the ledger does not have"
        if rows[0][1]:
            return f"{folder} is of version {version}, which an earlier --resume left behind"
        if rows[0][0] != step:
            return f"{folder} is of version {version}, which the ledger has at step {rows[0][0]}"
        known = self._ledger.query("SELECT digest FROM checkpoints WHERE version = ?", (version,))
        if known and known[0][0] != state["digest"]:
            return f"{folder} is not the checkpoint that the ledger has: its state.json has another digest"
        newest = self._ledger.query("SELECT COALESCE(MAX(version), -1) FROM checkpoints")[0][0]
        if not known and version <= newest:
            # Of the newest the ledger may not have heard before the run died.
            return f"{folder} is of version {version}, of which the ledger has no checkpoint"
        return None

    def _lost(self) -> Lost | None:
        """What was given out beyond what the ledger has, None if nothing was."""
        had = self._ledger.query(
            "SELECT (SELECT COALESCE(MAX(number), -1) + 1 FROM versions),"
            " (SELECT COALESCE(MAX(number), 0) + 1 FROM sessions)"
        )[0]
        versions, sequences, sessions = _given_out(self._run)
        if versions <= had[0] and sessions <= had[1]:
            return None
        return Lost(versions, max(sequences, _stored_sequences(self._run)), sessions, self._group_size)

    def _check_episodes(self, step: int) -> None:
        """The last stored step up to this one must be in the ledger as it is stored."""
        files = [(number, file) for number, file in self._run.step_files() if number <= step]
        if not files:
            return
        _, file = files[-1]
        decoder = msgspec.json.Decoder(_Line)
        try:
            lines = [decoder.decode(line) for line in file.read_bytes().splitlines()]
        except msgspec.DecodeError as error:
            raise RunFolderError(
                f"stored episodes can be read: {error}", str(file), "restore the file from a copy, or remove it"
            ) from error
        for line in lines:
            rows = self._ledger.query("SELECT state, produced FROM episodes WHERE id = ?", (line.id,))
            if rows != [("trained", line.produced_version)]:
                has = f"has it {rows[0][0]} into version {rows[0][1]}" if rows else "does not have it"
                said = f"{line.id} was trained into version {line.produced_version}, and the ledger {has}"
                raise RunFolderError(
                    f"a run is resumed where its ledger and its stored episodes agree: {said}",
                    str(file),
                    "restore the ledger from a copy, or begin a new run",
                )


class _Line(msgspec.Struct):
    """What is looked at of a stored episode."""

    id: str
    produced_version: int


def _given_out(run: RunFolder) -> tuple[int, int, int]:
    """Versions, groups and sessions whose numbers are below these were given out, as the events know it: a version
    was in the ledger before it was published, and a session before it said that it had started."""
    versions = sequences = sessions = 0
    for event in read_lines(run.events):
        kind, version = event.get("kind"), event.get("version")
        if kind in ("published", "published_in_part", "checkpoint", "started") and isinstance(version, int):
            # The version that a session starts with is in the ledger only once it is published.
            versions = max(versions, version + (kind != "started"))
        if kind == "started" and isinstance(event.get("session"), int):
            sessions = max(sessions, event["session"] + 1)
        if kind == "dropped" and isinstance(event.get("episode"), str):
            sequences = max(sequences, _sequence(event["episode"]) + 1)
    return versions, sequences, sessions


class _Place(msgspec.Struct):
    sequence: int = -1


def _stored_sequences(run: RunFolder) -> int:
    """All stored episodes are of groups whose numbers are below this."""
    found, decoder = 0, msgspec.json.Decoder(_Place)
    for _, file in run.step_files():
        with file.open("rb") as lines:
            for line in lines:
                try:
                    found = max(found, decoder.decode(line).sequence + 1)
                except msgspec.DecodeError:
                    continue  # a damaged line gives no number; the audit tells of it
    return found


def _sequence(episode: str) -> int:
    digits = episode.partition("/")[0].removeprefix("g")
    return int(digits) if digits.isdecimal() else -1


def _older(ledger: Ledger, lost: Lost) -> str:
    return (
        f"{ledger.path} is older than the run: events.jsonl has versions up to {lost.versions - 1} and session "
        f"{lost.sessions - 1}, it has {ledger.next_version() - 1} and "
        f"{ledger.query('SELECT COALESCE(MAX(number), 0) FROM sessions')[0][0]}"
    )


def _way_out(sound: list[int]) -> str:
    if not sound:
        return "begin again from the first model with --from 0, which drops what was trained since"
    older = ", ".join(map(str, sorted(sound, reverse=True)[:5]))
    return f"go on from an older state: --from {max(sound)} (sound checkpoints: {older})"
