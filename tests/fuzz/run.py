"""Coverage-guided fuzzing: `python tests/fuzz/run.py TARGET… --inputs 100000 --bytes 10000000`.

Inputs are tried until there were as many of them, and as many bytes, as asked for. A fault is an exception that
the target does not declare, an input that takes longer than its limit, one that takes more memory above its own
size than its limit, or one that ends the process. An input that caused one is kept: `--replay FILE` tries it again.
The result of each target goes to benchmarks/results/fuzz.json; the exit status is 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuzz_worker
from fuzz_targets import TARGETS, load

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent.parent / "benchmarks" / "results" / "fuzz.json"
_GRACE_S = 10.0
"""A process that is this much longer in one input than the target's limit is killed."""
_START_S = 120.0
"""A target may take so long to import what it needs, and to begin its session, on a busy machine."""
_SAY_EVERY_S = 10.0


@dataclass
class Outcome:
    """What fuzzing a target came to. Its faults are named by what went wrong; each has a file with its input."""

    target: str
    seed: int
    inputs: int = 0
    bytes: int = 0
    edges: int = 0
    kept: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    seconds: float = 0.0
    faults: dict[str, str] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "inputs": self.inputs,
            "bytes": self.bytes,
            "faults": len(self.faults),
            "refused": self.refused,
            "new_coverage": self.kept,
            "edges": self.edges,
            "slowest_ms": round(1000 * self.slowest_s, 1),
            "peak_mib_above_input": round(self.peak_bytes / 2**20, 1),
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
        }


def fuzz(
    name: str, inputs: int, size: int, seed: int, faults: Path, seconds: float = float("inf"), say: bool = False
) -> Outcome:
    """Tries inputs in processes of their own, one after the other: one that dies costs a fault, not the rest."""
    outcome = Outcome(name, seed)
    begun = time.monotonic()
    attempt = 0
    while True:
        left = seconds - (time.monotonic() - begun)
        missing = max(0, inputs - outcome.inputs), max(0, size - outcome.bytes)
        if left <= 0 or not any(missing) or attempt > 20:
            break
        _one_process(outcome, seed + attempt, *missing, left, faults, say)
        attempt += 1
    outcome.seconds = time.monotonic() - begun
    return outcome


def _one_process(
    outcome: Outcome, seed: int, inputs: int, size: int, seconds: float, faults: Path, say: bool
) -> None:
    target = load(outcome.target)
    faults.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile() as current:
        current.truncate(fuzz_worker.HEAD_BYTES + target.longest + 1)
        command = [sys.executable, __file__, outcome.target, "--worker", current.name]
        command += ["--inputs", str(inputs), "--bytes", str(size), "--seed", str(seed), "--seconds", str(seconds)]
        command += ["--faults", str(faults)]
        # Names hash alike in each process, so that a seed gives the same inputs again.
        env = os.environ | {"PYTHONHASHSEED": "0"}
        progress = fuzz_worker.Progress()
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
            try:
                said = time.monotonic()
                for progress in _reports(process, Path(current.name), target.limit_s + _GRACE_S):
                    if say and (progress.done or time.monotonic() > said + _SAY_EVERY_S):
                        said = time.monotonic()
                        _say(outcome, progress)
            finally:
                process.kill()
                status = process.wait()
        begun, size_begun, data = _current(Path(current.name))
    outcome.faults |= {what: where for what, where in progress.faults.items() if what not in outcome.faults}
    if not progress.done:
        what = f"the process ended: {f'signal {-status}' if status < 0 else f'exit status {status}'}"
        file = faults / f"ended-{process.pid}"
        file.write_bytes(data)
        outcome.faults.setdefault(what, str(file))
        if not begun:
            raise SystemExit(f"fuzzing {outcome.target} did not begin: {what}")
    outcome.inputs += max(progress.inputs, begun)
    outcome.bytes += max(progress.bytes, size_begun)
    outcome.edges = max(outcome.edges, progress.edges)
    outcome.kept = max(outcome.kept, progress.kept)
    outcome.refused += progress.refused
    outcome.slowest_s = max(outcome.slowest_s, progress.slowest_s)
    outcome.peak_bytes = max(outcome.peak_bytes, progress.peak_bytes)


def _reports(process: subprocess.Popen[bytes], current: Path, patience_s: float) -> Any:
    """What the process reports, until it ends, says that it is done, or stays in one input for too long."""
    assert process.stdout is not None
    changed, last = time.monotonic(), -1
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1.0):
                line = process.stdout.readline()
                if not line:
                    return
                progress = fuzz_worker.Progress(**json.loads(line))
                yield progress
                if progress.done:
                    return
            begun, _, _ = _current(current)
            if begun != last:
                changed, last = time.monotonic(), begun
            elif time.monotonic() - changed > (patience_s if begun else _START_S):
                return


def _current(file: Path) -> tuple[int, int, bytes]:
    """How many inputs were begun, their bytes, and the last of them."""
    content = file.read_bytes()
    begun, size, length = (int.from_bytes(content[place : place + 8], "little") for place in (0, 8, 16))
    start = fuzz_worker.HEAD_BYTES
    return begun, size, content[start : start + length]


def _say(outcome: Outcome, progress: fuzz_worker.Progress) -> None:
    text = (
        f"{outcome.target}: {outcome.inputs + progress.inputs:,} inputs, {outcome.bytes + progress.bytes:,} bytes"
    )
    text += f", {progress.edges:,} edges, {progress.kept:,} kept, {len(progress.faults)} faults"
    print(text, file=sys.stderr, flush=True)


def keep(outcomes: list[Outcome], file: Path = RESULTS) -> None:
    """Writes the results, beside those that the file has of other targets."""
    from headrace.bench import commit, result

    known = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {row["target"]: row for row in known}
    rows |= {outcome.target: {**outcome.row(), "commit": commit()} for outcome in outcomes}
    ordered = [rows[name] for name in sorted(rows)]
    figures = {
        "fuzz_inputs": sum(row["inputs"] for row in ordered),
        "fuzz_faults": sum(row["faults"] for row in ordered),
    }
    file.write_text(json.dumps(result("fuzz", ordered, figures), indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS), metavar="TARGET")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, without keeping a result")
    parser.add_argument(
        "--faults", type=Path, default=Path("runs/fuzz"), help="folder for inputs that cause faults"
    )
    parser.add_argument("--replay", type=Path, help="run this one input, with its traceback")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        [name] = asked.targets
        fuzz_worker.work(name, asked.seed, asked.inputs, asked.bytes, asked.seconds, asked.worker, asked.faults)
        return 0
    if asked.replay is not None:
        [name] = asked.targets
        target = load(name)
        with target.session():
            try:
                target.run(asked.replay.read_bytes())
            except target.declared as error:
                print(f"refused, as declared: {type(error).__name__}: {str(error)[:1000]}")
        return 0
    outcomes = []
    for name in asked.targets:
        outcome = fuzz(name, asked.inputs, asked.bytes, asked.seed, asked.faults / name, asked.seconds, say=True)
        print(json.dumps(outcome.row()))
        for what, where in outcome.faults.items():
            print(f"  FAULT {what}: {where}")
        outcomes.append(outcome)
    if asked.seconds == float("inf"):
        keep(outcomes)
    return int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
