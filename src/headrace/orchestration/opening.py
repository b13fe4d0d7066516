"""From what a user gives (a file, a run's folder, an object of Python) to a run's folder and configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.config.load import config_of, config_of_table, read_toml, table_of
from headrace.config.overrides import apply_overrides
from headrace.config.run import RunConfig
from headrace.definitions import Definitions
from headrace.errors import ConfigError, short
from headrace.orchestration.folder import config_to_resume
from headrace.telemetry.folder import RunFolder

Given = RunConfig | Mapping[str, Any] | str | Path
"""A configuration, the path of its file or, to resume, the run's folder."""


class Opened(NamedTuple):
    run: RunFolder
    """Looked at only where it is resumed, and not held yet."""
    config: RunConfig
    definitions: Definitions
    """Of the code that was given as classes and functions, and for more of it."""
    file: Mapping[str, Any] | None = None
    """The tables of the configuration file, if there was one."""


def open_run(
    given: Given | None, sets: Sequence[str] = (), run: str | Path | None = None, *, resume: bool
) -> Opened:
    """What is asked for. A resumed run's configuration is its own, under what was edited in the file since, what is
    given in Python, and `sets`. Nothing that the configuration points at has been looked at."""
    if given is None:
        if run is None or not resume:
            raise ConfigError(
                "a run has a configuration", "None", "give one; to go on with a run, its folder and resume=True"
            )
        given = run
    if isinstance(given, str | Path):
        path = Path(given)
        return _of_folder(path, sets, run, resume) if path.is_dir() else _of_file(path, sets, run, resume)
    if isinstance(given, Mapping):
        place = _place(run, given, sets, "run")
        definitions = _definitions(place)
        table = table_of(with_references(given, definitions))
        if resume and place.exists():
            return Opened(place, config_to_resume(place, table, sets, "in Python"), definitions)
        return Opened(place, config_of(table, sets), definitions)
    config = config_of(given, sets)
    place = RunFolder(run or Path("runs") / (config.name or "run"))
    return Opened(place, config, _definitions(place))


def _place(run: str | Path | None, table: Mapping[str, Any], sets: Sequence[str], otherwise: str) -> RunFolder:
    """The run's folder, before the rest of its configuration is known: what is resumed need not say all of it."""
    name = apply_overrides(table, sets).get("name")
    return RunFolder(run or Path("runs") / (name if isinstance(name, str) and name else otherwise))


def _of_folder(path: Path, sets: Sequence[str], run: str | Path | None, resume: bool) -> Opened:
    place = RunFolder(path)
    if not resume:
        there = "this folder has a run" if place.exists() else "this is a folder"
        raise ConfigError(
            f"a run begins with a configuration file, and {there}",
            str(path),
            f"go on with a run by its folder: headrace train --resume {path}",
        )
    if run is not None and Path(run).resolve() != path.resolve():
        raise ConfigError("a run is resumed in its own folder", str(run), "leave --run out")
    return Opened(place, config_to_resume(place.require(), None, sets), _definitions(place))


def _of_file(path: Path, sets: Sequence[str], run: str | Path | None, resume: bool) -> Opened:
    table = read_toml(path)
    place = _place(run, table, sets, path.stem)
    if resume and place.exists():
        before = read_toml(place.given) if place.given.is_file() else {}
        config = config_to_resume(place, table, sets, short(path), before=before)
    else:
        config = config_of_table(table, sets, short(path))
    return Opened(place, config, _definitions(place), table)


# ── Users' code in Python ────────────────────────────────────────────────────────────────────────────────


def _definitions(run: RunFolder) -> Definitions:
    """The references into this folder are equal, however it is named."""
    folder, here = run.path.absolute(), Path.cwd()
    return Definitions(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def with_references(given: Mapping[str, Any], definitions: Definitions) -> dict[str, Any]:
    """The same tables, where a class or function that stands as a `source` has become a reference."""
    table = dict(given)
    for key, value in table.items():
        if isinstance(value, Mapping):
            table[key] = with_references(value, definitions)
        elif isinstance(value, list | tuple):
            table[key] = [with_references(one, definitions) if isinstance(one, Mapping) else one for one in value]
        elif key == "source" and callable(value):
            table[key] = definitions.reference(value)
    return table


def with_source(config: RunConfig, room: str, source: str) -> RunConfig:
    """The configuration with another environment or scorer, which takes the place of several scorers too."""
    only: dict[str, Any] = {"rewards": ()} if room == "scorer" else {}
    own = msgspec.structs.replace(getattr(config, room), source=source, **only)
    return msgspec.structs.replace(config, **{room: own})


def refuse_windows() -> None:
    """Raise ConfigError where the system has not what the processes of a run are made of."""
    if sys.platform == "win32":
        raise ConfigError(
            "a run needs Linux or macOS: its processes hand each other sockets and signals that Windows has not",
            sys.platform,
            "use the Windows Subsystem for Linux (WSL 2); audit, show and report work here too",
        )
