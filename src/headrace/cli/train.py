"""`headrace train`: from a configuration file, or the folder of a run that goes on, to a finished run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from headrace.cli.output import console, facts_of, ledger_line, only_json, print_json
from headrace.config.outside import check_outside
from headrace.orchestration.folder import in_folder, prepare
from headrace.orchestration.opening import open_run, refuse_windows
from headrace.telemetry.evaluations import best_of_text, interval_text, metric_of, sets_of, shown, valid_number
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.words import staleness_in_words, steps_in_words, time_in_words

MAX_METRICS = 6
"""Of users' metrics, shown at the end of a run; summary.json has all."""


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
        ("steps", steps_in_words(summary)),
        *_evaluations(summary),
        ("staleness", staleness_in_words(summary)),
        ("episodes", ledger_line(summary.get("ledger") or {})),
        *time_in_words(summary),
        *_users_metrics(summary.get("user") or {}),
        ("report", str(run.report)),
        ("next", f"{myself()} audit {run.path}"),
        ("", f"{myself()} show {run.path} --best"),
    ]
    facts += [("warning", text) for text in summary.get("warnings", [])]
    ended = (
        "Finished"
        if summary.get("finished", True)
        else f"Stopped early ({myself()} train --resume {run.path} goes on)"
    )
    console().print(facts_of(facts, title=f"{ended}: {run.path}"))


def _users_metrics(means: dict[str, float]) -> list[tuple[str, str]]:
    text = ", ".join(f"{name} {mean:.3g}" for name, mean in list(means.items())[:MAX_METRICS])
    more = len(means) - MAX_METRICS
    return [("metrics", f"{text}, and {more} more" if more > 0 else text)] if means else []


def myself() -> str:
    """What to type for this program: its path where the shell would not find it, as after `make train`."""
    if shutil.which("headrace"):
        return "headrace"
    script = Path(sys.executable).with_name("headrace")
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def _evaluations(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Before and after training: of the set that chooses the best, then of each other one."""
    metric = summary.get("eval_metric") or "accuracy"
    numbers = [summary.get("eval_before"), summary.get("eval_after")]
    lines = summary.get("evaluations") or []
    last = sets_of(lines[-1]) if lines else {}
    rows = [(metric, _arrow(numbers, metric, next(iter(last.values()), {})))]
    for name, line in list(last.items())[1:]:
        first = sets_of(lines[0]).get(name, {})
        both = "reward" if "reward" in (metric_of(first), metric_of(line)) else "accuracy"
        rows.append((name, f"{both} {_arrow([valid_number(first), valid_number(line)], both, line)}"))
    return rows


def _arrow(numbers: list[Any], metric: str, last: Mapping[str, Any]) -> str:
    text = " → ".join(shown(number, metric) for number in numbers)
    if numbers[-1] is None:
        return text
    more = [part for part in (interval_text(last, metric), best_of_text(last, metric)) if part]
    return f"{text} ({', '.join(more)})" if more else text
