"""`headrace train`: from a configuration file to a finished run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from headrace.cli.output import console, facts_of, ledger_line, only_json, print_json
from headrace.config.load import load_config
from headrace.errors import RunFolderError
from headrace.orchestration.folder import prepare
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.words import staleness_in_words, steps_in_words, time_in_words


def command(
    file: Path,
    sets: list[str],
    folder: Path | None,
    *,
    resume: bool,
    from_step: int | None,
    overwrite: bool,
    json: bool,
) -> None:
    if resume and overwrite:
        raise RunFolderError("a run is resumed or overwritten, not both", "--resume --overwrite", "leave one out")
    with only_json(json):
        config = load_config(file, sets)
        run = RunFolder(folder or Path("runs") / (config.name or file.stem))
        config = prepare(run, config, resume=resume, overwrite=overwrite, from_step=from_step)
        try:
            from headrace.orchestration.local import run as execute

            summary = execute(config, run.path, resume=resume, from_step=from_step, progress=True)
        finally:
            run.release()
    if json:
        print_json(summary)
    else:
        print_summary(run, summary)
    if not summary["finished"]:
        raise typer.Exit(1)


def print_summary(run: RunFolder, summary: dict[str, Any]) -> None:
    facts = [
        ("steps", steps_in_words(summary)),
        ("accuracy", f"{accuracy(summary.get('eval_before'))} → {accuracy(summary.get('eval_after'))}"),
        ("staleness", staleness_in_words(summary)),
        ("episodes", ledger_line(summary.get("ledger") or {})),
        *time_in_words(summary),
        ("report", str(run.report)),
        ("next", f"{myself()} audit {run.path}"),
        ("", f"{myself()} show {run.path} --best"),
    ]
    ended = "Finished" if summary.get("finished", True) else "Stopped early (--resume goes on)"
    console().print(facts_of(facts, title=f"{ended}: {run.path}"))


def myself() -> str:
    """What to type for this program: its path where the shell would not find it, as after `make train`."""
    if shutil.which("headrace"):
        return "headrace"
    script = Path(sys.executable).with_name("headrace")
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def accuracy(value: Any) -> str:
    """An evaluation as a percentage: a number, or a record with `pass_1`; a dash where there was none."""
    if isinstance(value, dict):
        value = value.get("pass_1")
    return f"{value:.1%}" if isinstance(value, int | float) else "–"
