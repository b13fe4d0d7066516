"""What a run of examples/smollm2 has gained on held-out sums, with its 95 % interval.

python benchmarks/smollm2.py runs/smollm2-cpu
python benchmarks/smollm2.py runs/smollm2-cpu --json > benchmarks/results/smollm2-cpu-2cores.json

With --json the run is audited, too.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.bench import result


class Gain(NamedTuple):
    """A difference of two accuracies, in percentage points, and its 95 % interval."""

    points: float
    low: float
    high: float


def gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> Gain:
    """Newcombe's interval, from the Wilson intervals of two evaluations. It takes them for independent, though the
    tasks are the same: it is rather too wide than too narrow."""
    difference = after["pass_1"] - before["pass_1"]
    down = math.hypot(after["pass_1"] - after["low95"], before["high95"] - before["pass_1"])
    up = math.hypot(after["high95"] - after["pass_1"], before["pass_1"] - before["low95"])
    return Gain(*(100 * value for value in (difference, difference - down, difference + up)))


def row(run: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The run as one row of a table; its log-probs are recomputed."""
    audit = [sys.executable, "-m", "headrace.cli.main", "audit", str(run), "--recompute", "20", "--json"]
    audited = json.loads(subprocess.run(audit, stdout=subprocess.PIPE, check=False).stdout)
    first, last = summary["evaluations"][0], summary["evaluations"][-1]
    ledger = summary["ledger"]
    return {
        "accuracy_before": first["pass_1"],
        "accuracy_after": last["pass_1"],
        "held_out_tasks": first["tasks"],
        "with_a_number_before": first["user"]["number"],
        "with_a_number_after": last["user"]["number"],
        "ended_before": first["user"]["ended"],
        "ended_after": last["user"]["ended"],
        "length_before": first["length_mean"],
        "length_after": last["length_mean"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "staleness_max": summary["staleness_max"],
        "episodes_admitted": ledger["admitted"],
        "episodes_trained": ledger["trained"],
        "audit_ok": audited["ok"],
        "logprob_max_diff": audited["recomputed"]["max_abs_diff"],
    }


def main() -> None:
    run = Path(sys.argv[1])
    summary = json.loads((run / "summary.json").read_text())
    found = gain(summary["evaluations"][0], summary["evaluations"][-1])
    if "--json" not in sys.argv:
        print(f"gain          {found.points:.1f} points (95%: {found.low:.1f} to {found.high:.1f})")
        return
    figures = {
        "smollm2_cpu_gain_points": found.low,
        "smollm2_cpu_gain_points_measured": found.points,
        "smollm2_cpu_seconds": summary["seconds"],
    }
    print(json.dumps(result("smollm2", [row(run, summary)], figures), indent=1))


if __name__ == "__main__":
    main()
