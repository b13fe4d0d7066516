"""`headrace train`: from a configuration file, or the folder of a run that goes on, to a finished run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from headrace.cli.output import console, facts_of, ledger_line, only_json, print_json
from headrace.config.outside import check_outside
from headrace.orchestration.folder import in_folder, prepare
from headrace.orchestration.opening import open_run, refuse_windows
from headrace.telemetry.folder import RunFolder


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
    refuse_windows()
    with only_json(json):
        run, config, _, table = open_run(file, sets, folder, resume=resume)
        check_outside(config)
        config = prepare(run, config, resume=resume, overwrite=overwrite, from_step=from_step, file=table)
        with in_folder(run, resume=resume):
            from headrace.orchestration.local import run as execute

            summary = execute(config, run.path, resume=resume, from_step=from_step, progress=True)
    if json:
        print_json(summary)
    else:
        print_summary(run, summary)
    if not summary["finished"]:
        raise typer.Exit(1)


def print_summary(run: RunFolder, summary: dict[str, Any]) -> None:
    facts = [
        ("steps", _steps(summary)),
        ("accuracy", f"{accuracy(summary.get('eval_before'))} → {accuracy(summary.get('eval_after'))}"),
        ("staleness", f"at most {summary.get('staleness_max', 0)} versions"),
        ("episodes", ledger_line(summary.get("ledger") or {})),
        ("report", str(run.report)),
        ("next", f"{myself()} audit {run.path}"),
        ("", f"{myself()} show {run.path} --best"),
    ]
    ended = (
        "Finished"
        if summary.get("finished", True)
        else f"Stopped early ({myself()} train --resume {run.path} goes on)"
    )
    console().print(facts_of(facts, title=f"{ended}: {run.path}"))


def _steps(summary: dict[str, Any]) -> str:
    done, begun = summary.get("steps", 0), summary.get("first_step", 0)
    seconds = f"in {summary.get('seconds', 0.0):,.1f} s"
    return f"{done:,} {seconds}" if not begun else f"{done:,}, of which {done - begun:,} {seconds}"


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
