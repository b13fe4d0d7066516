"""A run's folder: where each of its files is, and who may use it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from headrace.errors import RunFolderError

LOCK = ".headrace.lock"
OWN = (
    "config.toml",
    "given*.toml",
    "interactive",
    "metrics*.jsonl",
    "events.jsonl",
    "ledger.sqlite*",
    "episodes",
    "checkpoints",
    "versions",
    "weights",
    "tensorboard",
    "wandb",
    "logs",
    "report.png",
    "summary.json",
    LOCK,
)
"""All that a run writes into its folder."""

_STEP_FILE = re.compile(r"step-(\d{6,})\.jsonl")


class RunFolder:
    """The paths of a run's files. Making one touches nothing."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.given = self.path / "given.toml"
        """What the configuration file itself says, without --set and defaults."""
        self.given_next = self.path / "given.next.toml"
        """The same for a session that resumes the run and has not begun yet."""
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self.episodes = self.path / "episodes"
        self.checkpoints = self.path / "checkpoints"
        self.versions = self.path / "versions"
        """Weights kept for `headrace audit --recompute`."""
        self.weights = self.path / "weights"
        """Versions on their way to the engines, where the transport is `files`."""
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report.png"
        self.summary = self.path / "summary.json"
        self._lock: int | None = None
        self._made: list[Path] = []
        """Folders that `make` has made, the innermost first."""

    # ── Finding, making, holding ─────────────────────────────────────────────────────────────────────────

    def exists(self) -> bool:
        """Whether a run has been here."""
        return self.config.is_file()

    def occupied(self) -> bool:
        """Whether there is anything here that a new run would mix with."""
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    def require(self) -> RunFolder:
        """Itself, if a run has been here."""
        if not self.path.is_dir():
            raise RunFolderError("a run's folder exists", str(self.path), _known_runs(self.path.parent))
        if not self.exists():
            raise RunFolderError(
                "a run's folder holds a config.toml",
                str(self.path),
                _known_runs(self.path) or "give a run's own folder, which also holds its ledger.sqlite",
            )
        return self

    def make(self, *, overwrite: bool = False) -> None:
        """A new, empty folder. Removes what is there only when told to, and only a run's folder."""
        if self.occupied():
            if not overwrite:
                raise RunFolderError(
                    "a new run begins in a folder of its own",
                    str(self.path),
                    "continue that run with --resume, replace it with --overwrite, or name another with --run DIR",
                )
            if not self.exists() or not (self.path / LOCK).is_file():
                raise RunFolderError(
                    "only a run's folder is overwritten, and Headrace has made no run in this one",
                    str(self.path),
                    "remove it yourself or choose another with --run DIR",
                )
            self.hold()
            self.release()
            self._remove_run()
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self.path.mkdir(parents=True, exist_ok=True)

    def unmake(self) -> None:
        """After a start that was refused: nothing is left that was not there before `make`."""
        self._remove_run()
        for folder in self._made:
            if any(folder.iterdir()):
                return
            folder.rmdir()

    def _remove_run(self) -> None:
        """What a run writes, and nothing else: a user's own files in the folder stay."""
        for pattern in OWN:
            for path in self.path.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def hold(self) -> None:
        """Keep other processes out until `release` or the end of this process."""
        import fcntl  # not on Windows, where runs are only read

        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode() or "another process"
            os.close(lock)
            raise RunFolderError(
                "a run's folder is used by one process at a time",
                str(self.path),
                f"wait for process {holder} to end, or choose another folder with --run DIR",
            ) from None
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────────────

    def step_file(self, step: int) -> Path:
        return self.episodes / f"step-{step:06d}.jsonl"

    def step_files(self) -> list[tuple[int, Path]]:
        """The recorded steps and their files, in order."""
        found = [(_STEP_FILE.fullmatch(file.name), file) for file in self.episodes.glob("step-*.jsonl")]
        return sorted((int(match[1]), file) for match, file in found if match)

    def orphaned_files(self) -> list[tuple[int, Path]]:
        """Steps that resuming set aside, and their files."""
        found = [(_STEP_FILE.fullmatch(file.name), file) for file in self.episodes.glob("orphaned-*/step-*.jsonl")]
        return sorted((int(match[1]), file) for match, file in found if match)

    def read_metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.metrics))

    def read_events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.events) if kind is None or event.get("kind") == kind]

    def digests(self) -> dict[str, str]:
        """XXH3-64 of the files that are complete when a run has ended, by their names."""
        files = [self.config, self.metrics, self.events]
        return {file.name: file_digest(file) for file in files if file.is_file()}

    # ── Resuming ─────────────────────────────────────────────────────────────────────────────────────────

    def rewind(self, step: int) -> dict[str, int]:
        """Set aside what was written about steps after `step`, which a restored checkpoint has orphaned.

        Their metrics go to metrics.orphaned.jsonl, their episodes to episodes/orphaned-N. Says how many.
        """
        lines = self.read_metrics()
        orphaned = [line for line in lines if line["step"] > step]
        if orphaned:
            with (self.path / "metrics.orphaned.jsonl").open("a", encoding="utf-8") as aside:
                aside.writelines(json.dumps(line) + "\n" for line in orphaned)
            kept = "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step)
            partial = self.metrics.with_suffix(".partial")
            partial.write_text(kept, encoding="utf-8")
            os.replace(partial, self.metrics)
        files = [file for number, file in self.step_files() if number > step]
        if files:
            aside_folder = self.episodes / f"orphaned-{len(list(self.episodes.glob('orphaned-*'))) + 1}"
            aside_folder.mkdir()
            for file in files:
                file.rename(aside_folder / file.name)
        return {"metrics": len(orphaned), "episode_files": len(files)}


def file_digest(file: Path) -> str:
    """XXH3-64 of a file's bytes."""
    found = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines. A last line that a crash cut short is left out."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise ValueError(f"it is of type {type(found).__name__}")
            except (ValueError, RecursionError) as error:
                raise RunFolderError(
                    f"{file}, line {number} is one JSON object", str(error), "the file is damaged: restore it"
                ) from error
            yield found


def _known_runs(folder: Path) -> str:
    runs = sorted(file.parent.name for file in folder.glob("*/config.toml")) if folder.is_dir() else []
    return f"runs in {folder}: {', '.join(runs[:12])}" if runs else ""
