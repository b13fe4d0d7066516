"""Benchmarks: each prints ratios measured in one run, and keeps them with hardware, date and commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil


def result(name: str, rows: list[dict[str, Any]], figures: dict[str, float]) -> dict[str, Any]:
    """A benchmark's result as `--json` prints it."""
    return {
        "bench": name,
        "hardware": hardware(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "rows": rows,
        "figures": figures,
    }


def hardware() -> dict[str, Any]:
    """What the figures were obtained on; torch and the GPU where the benchmark used torch in this process."""
    facts = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = torch.__version__
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The checkout's commit, marked when something but results has changed.

    Outside a checkout, where a copy of the tree runs on another machine, it is what HEADRACE_COMMIT says, or None.
    """
    found = _git(folder, "rev-parse", "--short=12", "HEAD")
    if found is None:
        return os.environ.get("HEADRACE_COMMIT") or None
    changed = _git(
        folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results"
    )
    return f"{found}-dirty" if changed else found


def _git(folder: Path, *words: str) -> str | None:
    """What git prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
