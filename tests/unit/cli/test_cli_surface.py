"""The command line is public: it may be added to, not changed."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable

import typer
from cli_answer import Answer

import headrace as package
from headrace.cli.main import app

SURFACE = {
    "train": ["config", "--set", "--run", "--resume", "--from", "--overwrite", "--json"],
    "audit": ["run", "--recompute", "--strict", "--json"],
    "show": ["run", "--best", "--worst", "--slowest", "--stalest", "--group", "--step", "-n", "--full", "--json"],
    "report": ["run", "--json"],
    "config": ["config", "--set", "--json"],
    "doctor": ["config", "--set", "--json"],
    "bench": ["name", "--set", "--json"],
}


def test_commands_and_options_are_those_promised() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {name: [parameter.opts[0] for parameter in command.params] for name, command in commands.items()}
    assert found == SURFACE


def test_help_answers_within_a_second_and_loads_nothing_heavy() -> None:
    program = """
import json, sys
sys.argv = ["headrace", "--help"]
from headrace.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = ("torch", "transformers", "matplotlib", "numpy", "tensorboard", "tokenizers")
    print(json.dumps({"code": end.code, "heavy": [name for name in heavy if name in sys.modules]}))
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: other work on this machine does not count.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert json.loads(done.stdout.splitlines()[-1]) == {"code": 0, "heavy": []}
    assert "train" in done.stdout
    assert seconds < 1


def test_the_help_of_bench_names_every_benchmark(headrace: Callable[..., Answer]) -> None:
    assert "What to measure: loop, engine, sync, mask, train, e2e." in headrace("bench", "--help").out


def test_the_installed_command_is_this_one() -> None:
    done = subprocess.run([sys.executable, "-m", "headrace.cli.main", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"headrace {package.__version__}\n")


def test_usage_errors_exit_with_2(headrace: Callable[..., Answer]) -> None:
    for line in ("trian", "train", "audit x --recompute -1", "show x --best --worst", "show x -n 0"):
        answer = headrace(*line.split())
        assert answer.code == 2, line
        assert answer.out == ""
        assert answer.err
