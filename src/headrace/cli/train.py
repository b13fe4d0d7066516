"""`headrace train`: from a configuration file to a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from headrace.cli.output import console, facts_of, ledger_line, only_json, print_json
from headrace.config.base import Config
from headrace.config.dump import dump_config
from headrace.config.load import load_config, read_config
from headrace.config.run import RunConfig
from headrace.errors import ConfigError, RunFolderError
from headrace.telemetry.folder import RunFolder

MAY_CHANGE = ("training.steps", "evaluation", "limits", "recording", "name")
"""What a resumed run may set differently; everything else it keeps."""


def command(file: Path, sets: list[str], folder: Path | None, *, resume: bool, overwrite: bool, json: bool) -> None:
    if resume and overwrite:
        raise RunFolderError("a run is resumed or overwritten, not both", "--resume --overwrite", "leave one out")
    with only_json(json):
        config = load_config(file, sets)
        run = RunFolder(folder or Path("runs") / (config.name or file.stem))
        prepare(run, config, resume=resume, overwrite=overwrite)
        try:
            from headrace.orchestration.local import run as execute

            summary = execute(config, run.path, resume=resume, progress=True)
        finally:
            run.release()
    if json:
        print_json(summary)
    else:
        print_summary(run, summary)
    if not summary["finished"]:
        raise typer.Exit(1)


def prepare(run: RunFolder, config: RunConfig, *, resume: bool, overwrite: bool) -> None:
    """The run's folder, held by this process, with the resolved configuration in it."""
    if resume:
        if not run.exists():
            raise RunFolderError(
                "--resume continues a run that has begun, and this folder holds none",
                str(run.path),
                "leave --resume out to begin one, or name the run's folder with --run DIR",
            )
        refuse_other_run(read_config(run.config), config)
    else:
        run.make(overwrite=overwrite)
    run.hold()
    run.config.write_text(dump_config(config), encoding="utf-8")


def refuse_other_run(stored: RunConfig, given: RunConfig) -> None:
    """A resumed run keeps its configuration, apart from `MAY_CHANGE`."""
    changed = [
        (key, before, after)
        for key, before, after in differences(stored, given)
        if not any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)
    ]
    if changed:
        raise ConfigError(
            f"a resumed run keeps its configuration, apart from {', '.join(MAY_CHANGE)}",
            ", ".join(f"{key}: {before!r} became {after!r}" for key, before, after in changed),
            "restore these values, or begin a new run with --run DIR",
        )


def differences(one: Config, other: Config, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    found: list[tuple[str, Any, Any]] = []
    for name in one.__struct_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, Config) and type(left) is type(right):
            found += differences(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append((prefix + name, left, right))
    return found


def print_summary(run: RunFolder, summary: dict[str, Any]) -> None:
    facts = [
        ("steps", f"{summary.get('steps', 0):,} in {summary.get('seconds', 0.0):,.1f} s"),
        ("accuracy", f"{accuracy(summary.get('eval_before'))} → {accuracy(summary.get('eval_after'))}"),
        ("staleness", f"at most {summary.get('staleness_max', 0)} versions"),
        ("episodes", ledger_line(summary.get("ledger") or {})),
        ("report", str(run.report)),
        ("next", f"headrace audit {run.path}    headrace show {run.path} --best"),
    ]
    ended = "Finished" if summary.get("finished", True) else "Stopped early (--resume goes on)"
    console().print(facts_of(facts, title=f"{ended}: {run.path}"))


def accuracy(value: Any) -> str:
    """An evaluation as a percentage: a number, or a record with `pass_1`; a dash where there was none."""
    if isinstance(value, dict):
        value = value.get("pass_1")
    return f"{value:.1%}" if isinstance(value, int | float) else "–"
