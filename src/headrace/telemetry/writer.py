"""Telemetry into a run's folder, by a thread of its own.

    step, event, batch ──▶ queue ──▶ writer thread ──▶ metrics.jsonl, events.jsonl, episodes/, TensorBoard, progress
                                                    └──▶ W&B, by a thread of its own

Callers never wait. A failing disk costs what could not be written, says so once on standard error, and stops
nothing. Only episodes can pile up: past `pending_limit` bytes of them, a step's episodes are left out, and an
event says which.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from headrace.records import Batch, Group
from headrace.telemetry.config import RecordingConfig
from headrace.telemetry.episodes import Decode, episode_lines, is_kept
from headrace.telemetry.evaluations import scalars_of
from headrace.telemetry.examples import as_markdown, examples_of
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.lines import LineFile
from headrace.telemetry.tensorboard import ScalarLog
from headrace.telemetry.wandb_tracker import WandbTracker

CLOSE_DEADLINE_S = 30.0


class Watcher(Protocol):
    """Someone who looks on, such as the terminal's progress bar. Called from the writer thread."""

    def step(self, line: dict[str, Any]) -> None: ...

    def event(self, kind: str, fields: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class FolderTelemetry:
    """The `Telemetry` of a run on this machine. Its methods may be called from any thread."""

    def __init__(
        self,
        folder: str | Path | RunFolder,
        recording: RecordingConfig | None = None,
        *,
        decode: Decode | None = None,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.time,
        pending_limit: int = 512 << 20,
        settings: Mapping[str, Any] | None = None,
    ):
        """`settings`: the run's configuration, for trackers that show it."""
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(folder)
        self.recording = recording or RecordingConfig()
        self.failures: Counter[str] = Counter()
        """How often each file could not be written."""
        self.first_error: dict[str, Exception] = {}
        self.recorded: Counter[str] = Counter()
        """Groups and episodes trained on, and how many of them were written."""
        self._decode = decode
        self._watcher = watcher
        self._clock = clock
        self._pending_limit = pending_limit
        self._pending = 0
        self._pending_lock = threading.Lock()
        self._files: dict[Path, LineFile] = {}
        self._scalars: ScalarLog | None = None
        wandb = self.recording.wandb
        self._wandb = None if wandb is None else WandbTracker(self.folder.path, wandb, settings or {})
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()
        self.event(
            "recording", fraction_of_groups=self.recording.episodes, rule="crc32(group id) < fraction * 2**32"
        )

    # ── What callers say ─────────────────────────────────────────────────────────────────────────────────

    def step(self, line: dict[str, Any]) -> None:
        self._queue.put(lambda: self._write_step(line))

    def event(self, kind: str, **fields: Any) -> None:
        now = self._clock()
        self._queue.put(lambda: self._write_event(kind, now, fields))

    def batch(self, batch: Batch, produced: int, teacher: int | None = None) -> None:
        size = _column_bytes(batch)
        with self._pending_lock:
            fits = self._pending == 0 or self._pending + size <= self._pending_limit
            self._pending += size if fits else 0
        if fits:
            self._queue.put(lambda: self._write_batch(batch, produced, teacher, size))
        else:
            self.event(
                "episodes_not_recorded", step=batch.step, groups=len(batch.groups), why="the disk is too slow"
            )

    async def close(self) -> None:
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_DEADLINE_S)
        if self._wandb is not None and not self._thread.is_alive():
            await asyncio.to_thread(self._wandb.close, CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            _warn(f"telemetry is still writing to {self.folder.path} after {CLOSE_DEADLINE_S:.0f} s")

    # ── What the thread writes ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
        self._write_event("recorded", self._clock(), dict(self.recorded))
        for name, close in self._closers():
            self._attempt(name, close)
        if self.failures:
            lost = ", ".join(f"{name} ({count})" for name, count in self.failures.items())
            _warn(f"telemetry could not write everything: {lost}")

    def _closers(self) -> list[tuple[str, Callable[[], None]]]:
        closers = [(path.name, file.close) for path, file in self._files.items()]
        if self._scalars is not None:
            closers.append(("tensorboard", self._scalars.close))
        if self._watcher is not None:
            closers.append(("progress", self._watcher.close))
        return closers

    def _write_step(self, line: dict[str, Any]) -> None:
        self._attempt("metrics.jsonl", lambda: self._append(self.folder.metrics, line))
        if self.recording.tensorboard:
            self._attempt("tensorboard", lambda: self._log().scalars(int(line["step"]), line, "train/"))
        if self._wandb is not None:
            wandb = self._wandb
            self._attempt("wandb", lambda: wandb.step(line))
        if self._watcher is not None:
            watcher = self._watcher
            self._attempt("progress", lambda: watcher.step(line))

    def _write_event(self, kind: str, now: float, fields: dict[str, Any]) -> None:
        line = {"kind": kind, "time": now, **fields}
        self._attempt("events.jsonl", lambda: self._append(self.folder.events, line))
        if kind == "evaluated":
            self._attempt("evaluations", lambda: self._chart_evaluation(fields))
        if self._watcher is not None:
            watcher = self._watcher
            self._attempt("progress", lambda: watcher.event(kind, fields))

    def _chart_evaluation(self, fields: dict[str, Any]) -> None:
        step, values = int(fields.get("step", 0)), scalars_of(fields)
        if self.recording.tensorboard:
            self._attempt("tensorboard", lambda: self._log().scalars(step, values))
        if self._wandb is not None:
            self._wandb.evaluated(step, values)

    def _show_examples(self, batch: Batch) -> None:
        count = self.recording.examples
        charted = self.recording.tensorboard or self._wandb is not None
        if not (charted and count) or (batch.step - 1) % self.recording.examples_every or self._decode is None:
            return
        examples = examples_of(batch, count, self._read)
        if self.recording.tensorboard:
            texts = [as_markdown(one) for one in examples]
            self._attempt("tensorboard", lambda: self._log().texts(batch.step, "episodes", texts))
        if self._wandb is not None:
            self._wandb.examples(examples)

    def _write_batch(self, batch: Batch, produced: int, teacher: int | None, size: int) -> None:
        self._attempt("episodes", lambda: self._write_episodes(batch, produced, teacher))
        self._attempt("examples", lambda: self._show_examples(batch))
        with self._pending_lock:
            self._pending -= size

    def _write_episodes(self, batch: Batch, produced: int, teacher: int | None) -> None:
        kept = {group.id for group in batch.groups if is_kept(group.id, self.recording.episodes)}

        def keep(group: Group) -> bool:
            return group.id in kept

        written = 0
        if kept:
            target = self.folder.step_file(batch.step)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            digest = xxhash.xxh3_64()
            with partial.open("wb") as file:
                for line in episode_lines(batch, produced, keep, self._decode and self._read, teacher):
                    file.write(line)
                    digest.update(line)
                    written += 1
            os.replace(partial, target)
            stored = {"step": batch.step, "episodes": written, "digest": digest.hexdigest()}
            self._write_event("stored", self._clock(), stored)
        self.recorded.update(
            groups_trained=len(batch.groups),
            groups_written=len(kept),
            episodes_trained=len(batch.advantages),
            episodes_written=written,
        )

    def _read(self, tokens: list[int]) -> str:
        assert self._decode is not None
        try:
            return self._decode(tokens)
        except Exception as error:
            self._failed("text of episodes", error)
            return ""

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        if path not in self._files:
            self._files[path] = LineFile(path)
        self._files[path].append(msgspec.json.encode(line, enc_hook=_plain) + b"\n")

    def _log(self) -> ScalarLog:
        if self._scalars is None:
            self._scalars = ScalarLog(self.folder.tensorboard)
        return self._scalars

    def _attempt(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.failures[name] += 1
        if name not in self.first_error:
            self.first_error[name] = error
            _warn(f"telemetry cannot write {name}, training goes on: {type(error).__name__}: {error}")


def _column_bytes(batch: Batch) -> int:
    return sum(
        turn.tokens.nbytes * 3 + turn.context.nbytes + (turn.support.ids.nbytes if turn.support is not None else 0)
        for episode in batch.episodes
        for turn in episode.turns
    )


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's; whatever else has no JSON form, as its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _warn(text: str) -> None:
    print(f"headrace: {text}", file=sys.stderr, flush=True)
