"""On Windows a run is refused in words, and what only reads runs works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

AS_ON_WINDOWS = """
import asyncio, asyncio.unix_events, ctypes, importlib, multiprocessing.connection, os, signal, subprocess, sys
import click._termui_impl, click.testing, rich.console, rich.progress, typer, typer.main, psutil, pathlib, tempfile
import numpy, xxhash, msgspec, tokenizers, safetensors.numpy, jinja2, sqlite3, platform, shutil, selectors
import matplotlib.pyplot, PIL.Image, logging.handlers

for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty"):
    sys.modules[name] = None
for name in ("fork", "killpg", "setsid", "nice", "getppid", "memfd_create", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGCONT", "SIGCHLD", "SIGSTOP"):
    delattr(signal, name)
# The libraries above have looked already: only what Headrace asks itself is answered so.
sys.platform = "win32"
if sys.argv[1] == "-c":
    exec(sys.argv[2])
else:
    from headrace.cli.main import main
    main()
"""


def as_on_windows(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS, *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_a_run_is_refused_before_anything_starts(project: Path) -> None:
    code, out, err = as_on_windows(project.parent, "train", "run.toml")
    assert (code, out) == (2, "")
    assert err.startswith("error: a run needs Linux or macOS: ")
    assert "Windows Subsystem for Linux" in err
    code, out, err = as_on_windows(project.parent, "-c", "import headrace; headrace.train('run.toml')")
    assert (code, out) == (1, "")
    assert "ConfigError: a run needs Linux or macOS: " in err
    assert not (project.parent / "runs").exists()


def test_the_doctor_says_so(project: Path) -> None:
    code, out, err = as_on_windows(project.parent, "doctor", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["can_run"] == []
    assert any("need Linux or macOS" in problem for problem in found["problems"])


def test_runs_are_read_there(project: Path) -> None:
    run = project.parent / "runs" / "run"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(project.read_text())
    (run / "metrics.jsonl").write_text('{"step": 1, "reward_mean": 0.5}\n')
    code, out, err = as_on_windows(project.parent, "report", "runs/run")
    assert (code, out.strip()) == (0, "runs/run/report.png"), err
    code, out, err = as_on_windows(project.parent, "show", "runs/run")
    assert "Traceback" not in err
    assert "unexpected" not in err
    code, out, err = as_on_windows(project.parent, "config", "run.toml")
    assert (code, "training" in out) == (0, True), err
