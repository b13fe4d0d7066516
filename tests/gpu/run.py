"""Runs the tests of this folder in two halves that each end within nine minutes, and keeps what came out.

    python tests/gpu/run.py [--half 1|2] [--results FILE]

Needs a GPU and an interpreter that has the packages; nothing is installed and no plugin of pytest is needed. The
result is benchmarks/results/tests-gpu.json: the card, the commit, and how many tests passed, failed and were
skipped, by half and in sum. A half's result joins that of the other one where both are of one commit. Outside a
checkout the environment variable HEADRACE_COMMIT names the commit. What has no outcome when the time is up failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tests-gpu.json"
LIMIT_S = 530.0
"""Of a half, in seconds. Nine minutes with the start and the end."""

Lanes = tuple[tuple[str, ...], ...]
HALVES: dict[int, Lanes] = {
    # These count the device's free memory or measure times: nothing else runs on it.
    1: (
        (
            "test_sleep.py",
            "test_long.py",
            "test_digest.py",
            "test_adapters.py",
            "test_collective_nccl.py",
            "test_delta_cuda.py",
            "test_out_of_memory_cuda.py",
        ),
    ),
    # Lanes run beside each other.
    2: (
        ("test_atomic_swap_cuda.py", "test_sync_faults_cuda.py", "test_cuda_ipc.py"),
        ("test_training_cuda.py", "test_cuda.py", "test_sampling_kernels.py"),
        (
            "test_pressure.py",
            "test_exact_cuda.py",
            "test_same_bits_cuda.py",
            "test_fork.py",
            "test_decode.py",
            "test_products.py",
            "test_fp8.py",
        ),
    ),
}
OUTCOMES = ("passed", "failed", "skipped")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the tests that need a GPU.")
    parser.add_argument("--half", type=int, choices=sorted(HALVES), help="this half alone; both without it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file to keep the result in")
    given = parser.parse_args(words)
    sys.path.insert(0, str(ROOT / "src"))
    import torch

    if not torch.cuda.is_available():
        print("tests/gpu needs a GPU, and torch finds none: `make test` has all other tests", file=sys.stderr)
        return 2
    from headrace.bench import commit, result

    head = result("tests_gpu", [], {})
    told = {"card": torch.cuda.get_device_name(), "commit": commit(), "date": head["date"]}
    failed = 0
    for half in [given.half] if given.half else sorted(HALVES):
        print(f"half {half} of {len(HALVES)}: {sum(map(len, HALVES[half]))} files", flush=True)
        began = time.monotonic()
        files = run_lanes([[HERE / name for name in lane] for lane in HALVES[half]], LIMIT_S)
        ours = {"half": half, **total(files), "seconds": round(time.monotonic() - began, 1)}
        failed += ours["failed"]
        kept = merged(read(given.results), head | told, ours, files)
        given.results.parent.mkdir(parents=True, exist_ok=True)
        given.results.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"half {half}: {ours}\n{given.results}", flush=True)
    return 1 if failed else 0


# ── Running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run_lanes(lanes: Sequence[Sequence[Path]], limit_s: float) -> list[dict[str, Any]]:
    """Each lane in a process of its own, file after file. Rows of what became of each file's tests."""
    end = time.monotonic() + limit_s
    # Children find the package wherever they run; ours comes first, whatever is installed.
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as scratch:
        started = []
        for number, lane in enumerate(lanes):
            told = Path(scratch) / f"lane-{number}"
            command = [
                sys.executable,
                str(Path(__file__).resolve().with_name("lane.py")),
                str(told),
                *map(str, lane),
            ]
            process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
            started.append((process, told, lane))
        rows = []
        for process, told, lane in started:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"time is up: {', '.join(path.name for path in lane)} have not ended", flush=True)
                # Also the processes that a test has started.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            rows += outcomes(told, lane)
    return rows


def outcomes(told: Path, lane: Sequence[Path]) -> list[dict[str, Any]]:
    """A test that was collected and has no outcome failed; so did a file of which no test was collected."""
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    rows = []
    for path in lane:
        own = [line for line in lines if line["file"] == path.name]
        counts = dict.fromkeys(OUTCOMES, 0)
        for test in dict.fromkeys(line["test"] for line in own):
            counts[_outcome([line for line in own if line["test"] == test and "outcome" in line])] += 1
        if not own:
            counts["failed"] = 1
        rows.append({"file": path.name, **counts, "seconds": round(sum(one.get("seconds", 0.0) for one in own), 1)})
    return rows


def _outcome(reports: Sequence[dict[str, Any]]) -> str:
    found = {report["outcome"] for report in reports}
    called = any(report["called"] for report in reports)
    return "failed" if "failed" in found else "skipped" if "skipped" in found else "passed" if called else "failed"


# ── Keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────


def total(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {key: sum(row[key] for row in rows) for key in OUTCOMES}


def read(results: Path) -> dict[str, Any]:
    return json.loads(results.read_text()) if results.exists() else {}


def merged(
    before: dict[str, Any], told: dict[str, Any], ours: dict[str, Any], files: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """With the other half's rows where they are of the same commit. Figures are there when both halves are."""
    same = before.get("commit") == told["commit"] and told["commit"] is not None
    rows = [row for row in before.get("rows", []) if same and row["half"] != ours["half"]]
    rows += [{"part": "halves", **ours}, *({"part": "files", "half": ours["half"], **row} for row in files)]
    rows.sort(key=lambda row: (row["part"] == "files", row["half"]))
    halves = [row for row in rows if row["part"] == "halves"]
    summed = {**total(halves), "seconds": round(sum(row["seconds"] for row in halves), 1)}
    whole = [row["half"] for row in halves] == sorted(HALVES)
    figures = {f"gpu_tests_{key}": value for key, value in summed.items()} if whole else {}
    return told | summed | {"rows": rows, "figures": figures}


if __name__ == "__main__":
    sys.exit(main())
