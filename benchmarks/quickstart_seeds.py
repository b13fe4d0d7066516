"""The quickstart with several seeds, each beside its control with shuffled rewards, each audited.

python benchmarks/quickstart_seeds.py [seeds=3] > benchmarks/results/quickstart-cpu-2cores.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.bench import result

CONFIG = "examples/quickstart/quickstart.toml"


def headrace(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace.cli.main", *words, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def one_seed(seed: int, scratch: Path) -> dict[str, Any]:
    model = scratch / f"model-{seed}"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(model), str(seed)], check=True)
    sets = ["--set", f"model.path={model}", "--set", f"seed={seed}"]
    run = headrace("train", CONFIG, "--run", str(scratch / f"run-{seed}"), *sets)
    audit = headrace("audit", str(scratch / f"run-{seed}"), "--recompute", "50")
    control = headrace(
        "train", CONFIG, "--run", str(scratch / f"control-{seed}"), *sets, "--set", "training.shuffle_rewards=true"
    )
    return {
        "seed": seed,
        "accuracy_before": run["eval_before"],
        "accuracy_after": run["eval_after"],
        "gain_with_shuffled_rewards": control["eval_after"] - control["eval_before"],
        "seconds": run["seconds"],
        "held_out_tasks": run["evaluations"][0]["tasks"],
        "length_before": run["evaluations"][0]["length_mean"],
        "length_after": run["evaluations"][-1]["length_mean"],
        "staleness_max": run["staleness_max"],
        "audit_ok": audit["ok"],
        "logprob_max_diff": audit["recomputed"]["max_abs_diff"],
    }


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as scratch:
        rows = [one_seed(seed, Path(scratch)) for seed in range(seeds)]
    figures = {
        "accuracy_before_min": min(row["accuracy_before"] for row in rows),
        "accuracy_before_max": max(row["accuracy_before"] for row in rows),
        "accuracy_after_min": min(row["accuracy_after"] for row in rows),
        "rise_min": min(row["accuracy_after"] - row["accuracy_before"] for row in rows),
        "shuffled_gain_max": max(row["gain_with_shuffled_rewards"] for row in rows),
        "logprob_max_diff": max(row["logprob_max_diff"] for row in rows),
        "seconds_max": max(row["seconds"] for row in rows),
    }
    print(json.dumps(result("quickstart_seeds", rows, figures), indent=1))


if __name__ == "__main__":
    main()
