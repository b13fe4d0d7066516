"""What a run left behind, opened for reading: one step, one line, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.config.load import config_of_text
from headrace.config.run import RunConfig
from headrace.errors import InputError, RunFolderError
from headrace.ledger import Ledger
from headrace.telemetry.episodes import StoredEpisode, read_step_file
from headrace.telemetry.folder import RunFolder, read_lines

Lines = Callable[[], Iterable[dict[str, Any]]]


def _none() -> Iterable[dict[str, Any]]:
    return ()


@dataclass
class StoredStep:
    """The stored episodes of one training step. They are read when they are asked for."""

    step: int
    episodes: Callable[[], Iterator[StoredEpisode]]
    where: str
    file: Path | None = None


@dataclass
class Evidence:
    """The files of a run, or what stands for them in a simulation."""

    ledger: Ledger
    config: RunConfig
    """As the last session began with it."""
    steps: list[StoredStep]
    """In order."""
    events: Lines = _none
    metrics: Lines | None = None
    """None: there are none to be had, as in a simulation."""
    orphaned: list[StoredStep] = field(default_factory=list)
    """What a resumed run set aside."""
    folder: RunFolder | None = None

    @cached_property
    def crashed(self) -> bool:
        """Whether the last session has not ended in order, so that the ends of files may be missing."""
        rows = self.ledger.query("SELECT finished FROM sessions ORDER BY number DESC LIMIT 1")
        return not rows or not rows[0][0]

    @cached_property
    def fractions(self) -> dict[int, float]:
        """The share of groups that each session recorded."""
        rows = self.ledger.rows("SELECT number, config FROM sessions")
        texts: dict[str, float] = {}
        found = {}
        for number, text in rows:
            if text not in texts:
                texts[text] = self.config.recording.episodes
                if text:
                    try:
                        texts[text] = config_of_text(text, "the ledger").recording.episodes
                    except InputError:
                        continue  # `check_sessions` tells of it
            found[number] = texts[text]
        return found


def config_in(ledger: Ledger) -> RunConfig:
    """The configuration of the last session, as the ledger has it."""
    text = ledger.query("SELECT config FROM sessions WHERE config <> '' ORDER BY number DESC LIMIT 1")
    if not text:
        raise RunFolderError("a ledger has the configuration of its sessions", str(ledger.path), "restore the file")
    return config_of_text(text[0][0], f"{ledger.path}, the configuration of its last session")


def open_evidence(folder: RunFolder) -> Evidence:
    """The evidence in a run's folder. Close its ledger afterwards."""
    if not any(place.exists() for place in (folder.ledger, folder.metrics, folder.events, folder.episodes)):
        raise RunFolderError(
            "an audit looks at what a run did, and this one ended while it was starting",
            str(folder.path),
            "begin it with headrace train CONFIG.toml --resume",
        )
    ledger = Ledger(folder.ledger, read_only=True)
    return Evidence(
        ledger=ledger,
        config=config_in(ledger),
        steps=[_stored(number, file) for number, file in folder.step_files()],
        events=lambda: read_lines(folder.events),
        metrics=lambda: read_lines(folder.metrics),
        orphaned=[_stored(number, file) for number, file in folder.orphaned_files()],
        folder=folder,
    )


def _stored(number: int, file: Path) -> StoredStep:
    return StoredStep(number, lambda: read_step_file(file), f"{file.parent.name}/{file.name}", file)
