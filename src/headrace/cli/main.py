"""The command line. Each command's work is in a module of its own, imported when the command is called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.benchmarks import BENCHMARKS
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else there.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Override one value.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/quickstart.")]
Benchmark = Annotated[str, typer.Argument(metavar="NAME", help=f"What to measure: {', '.join(BENCHMARKS)}.")]


def _version(wanted: bool) -> None:
    if wanted:
        from headrace import __version__

        typer.echo(f"headrace {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


@app.command()
def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration; to resume, the run's folder.")
    ],
    sets: Sets = None,
    run: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder; runs/NAME otherwise.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last checkpoint.")] = False,
    from_step: Annotated[
        int | None,
        typer.Option("--from", metavar="STEP", min=0, help="Resume from this step's checkpoint; 0: begin again."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove a run that is already there.")] = False,
    json: Json = False,
) -> None:
    """Train a policy as CONFIG.toml says. `headrace train --resume RUN` goes on with a run as it was begun."""
    from headrace.cli.train import command

    command(config, sets or [], run, resume=resume, from_step=from_step, overwrite=overwrite, json=json)


@app.command()
def audit(
    run: Run,
    recompute: Annotated[
        int, typer.Option(metavar="K", min=0, help="Recompute K episodes' log-probs under their saved versions.")
    ] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where something could not be looked at.")] = False,
    json: Json = False,
) -> None:
    """Check laws 1 to 4 on a finished or crashed run."""
    from headrace.cli.audit import command

    command(run, recompute, strict=strict, json=json)


@app.command()
def show(
    run: Run,
    best: Annotated[bool, typer.Option("--best", help="Highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest reward first.")] = False,
    slowest: Annotated[bool, typer.Option("--slowest", help="Longest in seconds first.")] = False,
    stalest: Annotated[bool, typer.Option("--stalest", help="Furthest behind the trainer first.")] = False,
    group: Annotated[str | None, typer.Option(metavar="ID", help="Only this group's episodes.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only this step's episodes.")] = None,
    count: Annotated[int, typer.Option("-n", metavar="COUNT", min=1, help="How many.")] = 5,
    full: Annotated[bool, typer.Option("--full", help="Leave nothing out of long texts.")] = False,
    json: Json = False,
) -> None:
    """Read a run's episodes; the latest ones unless told otherwise."""
    from headrace.cli.show import ORDERS, command

    flags = dict(zip(ORDERS, (best, worst, slowest, stalest), strict=True))
    chosen = [name for name, given in flags.items() if given]
    if len(chosen) > 1:
        raise typer.BadParameter(f"choose one of --{' and --'.join(chosen)}")
    command(run, chosen[0] if chosen else None, group, step, count, full=full, json=json)


@app.command()
def report(run: Run, json: Json = False) -> None:
    """Draw a run's report.png again, and say where it is."""
    from headrace.cli.report import command

    command(run, json=json)


@app.command()
def config(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="A run's configuration.")],
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Print the configuration that a run would begin with, and where each value comes from."""
    from headrace.cli.config import command

    command(config, sets or [], json=json)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Also say what this run needs, and choose.")
    ] = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Say what this machine can run, and what is missing; with a configuration, its memory plan."""
    from headrace.cli.doctor import command

    command(config, sets or [], json=json)


@app.command()
def bench(
    name: Benchmark,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Measure this machine."""
    from headrace.cli.bench import command

    command(name, sets or [], json=json)


def main() -> None:
    """Exit code 0; 2 for bad input or configuration; 1 for anything else."""
    try:
        app(prog_name="headrace")
    except Exception as error:
        if os.environ.get("HEADRACE_DEBUG"):
            raise
        print(_message(error), file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, HeadraceError) else 1)


def _message(error: Exception) -> str:
    if not isinstance(error, HeadraceError):
        return f"error: unexpected {type(error).__name__}: {error}\n  HEADRACE_DEBUG=1 shows where"
    text = f"error: {error.rule}"
    if error.value is not None:
        text += f" (got {error.value!r})"
    return f"{text}\n  {error.remedy}" if error.remedy else text


if __name__ == "__main__":
    main()
