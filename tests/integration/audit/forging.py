"""What a forger needs: changes to the files of a finished run, and figures that follow from changed ones.

Every function changes meaning, never formatting, and fails where there was nothing to change: a tampering that does
nothing would count as unnoticed.
"""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.config.dump import dump_config
from headrace.config.load import read_config
from headrace.ledger import Ledger
from headrace.records import Batch, Group
from headrace.scoring.advantages import advantages
from headrace.telemetry.episodes import read_episodes
from headrace.telemetry.folder import RunFolder, file_digest
from headrace.telemetry.metrics import users_keys, users_summary
from headrace.training.checkpoint_state import _digest, fingerprint
from headrace.training.metrics import batch_metrics
from headrace.training.packing import training_sequences

Line = dict[str, Any]
Apply = Callable[[Path], None]
FIRST_STEP = 7
"""Forgers look for a victim from this step on: late enough for swaps, and after the resumed run's restore."""


@dataclass(frozen=True)
class Tampering:
    """One forgery of a finished run's folder."""

    name: str
    apply: Apply
    invented: bool
    """Thought of before the audit knew of it, rather than known to have gone unnoticed."""
    run: Literal["plain", "resumed"] = "resumed"
    """The run it is tried on."""
    unseeable: str = ""
    """Why nothing in the folder can tell, where that is so in principle."""


# ── Stored episodes ──────────────────────────────────────────────────────────────────────────────────────


def step_files(run: Path) -> list[Path]:
    return sorted((run / "episodes").glob("step-*.jsonl"))


def load(file: Path) -> list[Line]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def save(file: Path, lines: Iterable[Line]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def find(
    run: Path, wanted: Callable[[Line], bool] = lambda line: True, first: int = FIRST_STEP
) -> tuple[Path, int]:
    """The first stored episode from that step on that is as wanted: its file, and its place there."""
    for file in step_files(run)[first - 1 :]:
        for place, line in enumerate(load(file)):
            if wanted(line):
                return file, place
    raise AssertionError("no stored episode is as the tampering needs it")


def on_line(change: Callable[[Line], Any], wanted: Callable[[Line], bool] = lambda line: True) -> Apply:
    """Change one stored episode. What `change` returns are columns of its ledger row, to be changed as well."""

    def apply(run: Path) -> None:
        file, place = find(run, wanted)
        lines = load(file)
        before = json.dumps(lines[place])
        columns = change(lines[place])
        assert json.dumps(lines[place]) != before, "the episode is unchanged"
        save(file, lines)
        if isinstance(columns, dict):
            rebook(run, lines[place]["id"], **columns)

    return apply


def on_turn(change: Callable[[Line], Any], wanted: Callable[[Line], bool] = lambda turn: True) -> Apply:
    """Likewise with one turn: the first that is as wanted."""

    def change_line(line: Line) -> Any:
        return change(next(turn for turn in line["turns"] if wanted(turn)))

    return on_line(change_line, lambda line: any(wanted(turn) for turn in line["turns"]))


def on_lines(change: Callable[[Line], Any], first: int = 1) -> Apply:
    """Change all stored episodes from a step on."""

    def apply(run: Path) -> None:
        changed = False
        for file in step_files(run)[first - 1 :]:
            lines = load(file)
            before = json.dumps(lines)
            for line in lines:
                change(line)
            changed |= json.dumps(lines) != before
            save(file, lines)
        assert changed, "no episode is changed"

    return apply


def on_turns(change: Callable[[Line], Any], first: int = 1) -> Apply:
    def change_line(line: Line) -> None:
        for turn in line["turns"]:
            change(turn)

    return on_lines(change_line, first)


def on_step(change: Callable[[list[Line]], list[Line] | None], step: int = FIRST_STEP) -> Apply:
    """Change the list of a step's stored episodes, in place or by returning another."""

    def apply(run: Path) -> None:
        file = run / "episodes" / f"step-{step:06d}.jsonl"
        lines = load(file)
        before = json.dumps(lines)
        lines = change(lines) or lines
        assert json.dumps(lines) != before
        save(file, lines)

    return apply


def groups_of(lines: list[Line]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["group"], []).append(line)
    return found


def swapped(turn: Line) -> bool:
    """A swap fell between its sampled tokens."""
    return len(set(turn["versions"])) > 1


def saw_swap(line: Line) -> bool:
    return any(swapped(turn) for turn in line["turns"])


def long(turn: Line) -> bool:
    return len(turn["tokens"]) > 4


def versions_of(line: Line) -> dict[str, int]:
    """The columns of its ledger row that follow from its tokens' versions."""
    every = [version for turn in line["turns"] for version in turn["versions"]]
    return {"version_min": min(every), "version_max": max(every)}


def tokens_of(line: Line) -> dict[str, int]:
    return {"tokens": sum(len(turn["tokens"]) for turn in line["turns"])}


def cut_tokens(turn: Line, keep: slice) -> None:
    """Leave some of a turn's tokens, in all its columns."""
    count = len(turn["tokens"])
    for column in ("tokens", "logprobs", "versions"):
        turn[column] = turn[column][keep]
    if turn["support"] is not None:
        rows = support_rows(turn)[keep]
        set_support(turn, rows)
    assert len(turn["tokens"]) < count


def support_rows(turn: Line) -> list[list[int]]:
    ids, offsets = turn["support"]["ids"], turn["support"]["offsets"]
    return [ids[start:end] for start, end in pairwise(offsets)]


def set_support(turn: Line, rows: list[list[int]]) -> None:
    offsets = [0, *np.cumsum([len(row) for row in rows]).tolist()]
    turn["support"] = {"ids": [token for row in rows for token in row], "offsets": offsets}


def text_of(line: Line) -> str:
    """What the test's tokenizer makes of the tokens; 17 ends a sequence and is not shown."""
    return "\n".join(" ".join(f"w{token}" for token in turn["tokens"] if token != 17) for turn in line["turns"])


# ── The ledger ───────────────────────────────────────────────────────────────────────────────────────────


def execute(run: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run one statement on the ledger and leave all in its main file."""
    with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as db:
        done = db.execute(statement, values)
        rows = done.fetchall()
        if not statement.lstrip().upper().startswith("SELECT"):
            assert done.rowcount > 0, f"no row is changed by: {statement}"
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return rows


def sql(*statements: str) -> Apply:
    def apply(run: Path) -> None:
        for statement in statements:
            execute(run, statement)

    return apply


def rebook(run: Path, episode: str, **columns: Any) -> None:
    assignments = ", ".join(f"{name} = ?" for name in columns)
    execute(run, f"UPDATE episodes SET {assignments} WHERE id = ?", *columns.values(), episode)


# ── Other files ──────────────────────────────────────────────────────────────────────────────────────────


def on_file(name: str, change: Callable[[list[Line]], list[Line] | None]) -> Apply:
    """Change the lines of events.jsonl or metrics.jsonl."""

    def apply(run: Path) -> None:
        lines = load(run / name)
        before = json.dumps(lines)
        lines = lines if (new := change(lines)) is None else new
        assert json.dumps(lines) != before
        save(run / name, lines)

    return apply


def on_event(kind: str, change: Callable[[Line], Any], number: int = 0) -> Apply:
    """Change one event of a kind."""
    return on_file("events.jsonl", lambda lines: change([e for e in lines if e["kind"] == kind][number]))


def on_json(name: str, change: Callable[[Line], Any]) -> Apply:
    def apply(run: Path) -> None:
        content = json.loads((run / name).read_text())
        before = json.dumps(content)
        change(content)
        assert json.dumps(content) != before
        (run / name).write_text(json.dumps(content, indent=1) + "\n")

    return apply


def on_config(line: str, other: str) -> Apply:
    """Replace one line of config.toml; the result is valid."""

    def apply(run: Path) -> None:
        file = run / "config.toml"
        lines = file.read_text().splitlines()
        assert line in lines, line
        lines[lines.index(line)] = other
        file.write_text("\n".join(lines) + "\n")
        tomllib.loads(file.read_text())
        file.write_text(dump_config(read_config(file)))

    return apply


def on_weights(name: str, change: Callable[[dict[str, Any]], Any]) -> Apply:
    """Change the tensors of the safetensors files that `name`, a pattern below the run's folder, matches."""

    def apply(run: Path) -> None:
        from safetensors.torch import load_file, save_file

        files = sorted(run.glob(name))
        assert files, name
        for file in files:
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file)

    return apply


def together(*parts: Apply) -> Apply:
    def apply(run: Path) -> None:
        for part in parts:
            part(run)

    return apply


# ── Figures that follow from others ──────────────────────────────────────────────────────────────────────


def batch_of(run: Path, step: int) -> tuple[Batch, list[Line]]:
    """A step's batch, as its stored episodes have it, and their lines."""
    stored = list(read_episodes(run, step))
    groups = []
    for name in dict.fromkeys(item.group for item in stored):
        members = [item for item in stored if item.group == name]
        first = members[0]
        groups.append(
            Group(
                id=name,
                sequence=first.sequence,
                task=first.episode.task,
                episodes=tuple(item.episode for item in members),
                admitted_version=first.admitted_version,
            )
        )
    batch = Batch(
        step=step,
        version=stored[0].trained_version,
        groups=tuple(groups),
        advantages=np.array([item.advantage for item in stored], np.float32),
    )
    return batch, load(run / "episodes" / f"step-{step:06d}.jsonl")


def settle_advantages(run: Path, step: int) -> None:
    """Compute a step's advantages again from its rewards, as the run's algorithm does."""
    how = read_config(run / "config.toml").training.algorithm.recipe
    batch, lines = batch_of(run, step)
    found = advantages(batch.groups, baseline=how.baseline, scale=how.scale, overlong=how.overlong)
    for line, advantage in zip(lines, found, strict=True):
        line["advantage"] = float(advantage)
    save(run / "episodes" / f"step-{step:06d}.jsonl", lines)


def settle_all_advantages(run: Path) -> None:
    for file in step_files(run):
        settle_advantages(run, load(file)[0]["step"])


def settle_metrics(run: Path) -> None:
    """Compute again what metrics.jsonl says of rewards, lengths and versions, from the stored episodes."""
    lines = load(run / "metrics.jsonl")
    for line in lines:
        if (run / "episodes" / f"step-{line['step']:06d}.jsonl").exists():
            batch, _ = batch_of(run, line["step"])
            line.update(batch_metrics(batch, training_sequences(batch)))
            line.update(users_keys(episode.metrics for episode in batch.episodes))
    save(run / "metrics.jsonl", lines)


def settle_summary(run: Path) -> None:
    """Compute again what summary.json says of the ledger."""
    ledger = Ledger(run / "ledger.sqlite", read_only=True)
    summary = json.loads((run / "summary.json").read_text())
    summary["ledger"] = ledger.sums()
    trained = "FROM episodes WHERE state = 'trained'"
    summary["staleness_max"] = ledger.query(f"SELECT COALESCE(MAX(trained_at - version_min), 0) {trained}")[0][0]
    lengths = ledger.query("SELECT state, AVG(tokens) FROM episodes WHERE tokens > 0 GROUP BY state")
    summary["mean_tokens"] = {state: round(mean, 2) for state, mean in lengths}
    summary["user"] = users_summary(load(run / "metrics.jsonl"))
    ledger.close()
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def settle_recorded(run: Path) -> None:
    """Make the last session's event of what it recorded fit the files."""
    lines = load(run / "events.jsonl")
    began = [e["step"] for e in lines if e["kind"] == "started"][-1]
    stored = [line for file in step_files(run)[began:] for line in load(file)]
    groups = len({line["group"] for line in stored})
    last = [e for e in lines if e["kind"] == "recorded"][-1]
    last.update(
        groups_trained=groups, groups_written=groups, episodes_trained=len(stored), episodes_written=len(stored)
    )
    save(run / "events.jsonl", lines)


def settle(run: Path) -> None:
    """All figures that follow from the ledger and the stored episodes are as these have them now."""
    settle_metrics(run)
    settle_summary(run)
    settle_recorded(run)


def reseal(run: Path) -> None:
    """Compute every digest again, as a forger does who knows of them."""
    events = load(run / "events.jsonl")
    last = {event["step"]: event for event in events if event.get("kind") == "stored"}
    for event in last.values():
        file = run / "episodes" / f"step-{event['step']:06d}.jsonl"
        if file.is_file():
            event["digest"] = file_digest(file)
    if events:
        save(run / "events.jsonl", events)
    for folder in sorted((run / "checkpoints").glob("step-*")):
        state = json.loads((folder / "state.json").read_text())
        state["files"] = {name: fingerprint(folder / name) for name in state["files"] if (folder / name).is_file()}
        state["digest"] = _digest(state)
        (folder / "state.json").write_text(json.dumps(state, indent=1))
        with closing(sqlite3.connect(run / "ledger.sqlite", isolation_level=None)) as db:
            db.execute("UPDATE checkpoints SET digest = ? WHERE version = ?", (state["digest"], state["version"]))
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
        summary["digests"] = RunFolder(run).digests()
        (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
