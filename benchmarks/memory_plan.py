"""What the memory plan says beside what runs hold, with nothing set but model, tasks, scorer, batch and lengths.

    python benchmarks/memory_plan.py [cpu|gpu] [case …] > benchmarks/results/memory-cpu-2cores.json

Weights are random. On a GPU: five steps at 2,048 tokens and two at 16,384, where one episode of each group has
full length and the others are short. On a CPU: the quickstart, and 0.1 B parameters, whole and with an adapter. A
row is a process; figures are of the memory that is compared: the device's on a GPU, resident memory on a CPU.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headrace.records import Task

GROUPS, GROUP = 16, 8
SHORT = 128
"""Tokens of the episodes that are not of full length."""


class Case(NamedTuple):
    name: str
    shape: dict[str, int]
    """Of a Qwen3 model: hidden, inner, layers, heads, kv_heads, head_dim, vocabulary."""
    context: int
    steps: int
    lora: int = 0
    groups: int = GROUPS
    group: int = GROUP
    long: int = GROUP
    """Episodes of a group that have full length."""
    running: int | None = None
    """`engine.max_running`. On a CPU pages of the cache that were never used are not resident, so a short run is
    compared with a cache that it fills."""


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden": hidden,
        "inner": inner,
        "layers": layers,
        "heads": heads,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151_936,
    }


GPU_SHAPES = {
    "0.6b": (_qwen3(1024, 3072, 28, 16), 0),
    "1.7b": (_qwen3(2048, 6144, 28, 16), 0),
    "4b": (_qwen3(2560, 9728, 36, 32), 0),
    "8b-lora": (_qwen3(4096, 12288, 36, 32), 32),
    "14b-lora": (_qwen3(5120, 17408, 40, 40), 32),
}
GPU = [Case(f"{name}-2k", shape, 2048, 5, lora) for name, (shape, lora) in GPU_SHAPES.items()] + [
    Case(f"{name}-16k", shape, 16_384, 2, lora, long=1) for name, (shape, lora) in GPU_SHAPES.items()
]
_SMALL = {
    "hidden": 768,
    "inner": 2304,
    "layers": 14,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 128,
    "vocabulary": 16_384,
}
CPU = [
    Case("0.1b", _SMALL, 128, 3, groups=2, group=4, long=4, running=8),
    Case("0.1b-lora", _SMALL, 128, 3, lora=16, groups=2, group=4, long=4, running=8),
]


# ── What a run's processes import ────────────────────────────────────────────────────────────────────────────────


def tasks(count: int, context: int, group: int, long: int, vocabulary: int) -> Iterator[Task]:
    """For `headrace.bench.workload:GivenLengths`: `long` episodes of each group fill the context."""
    dice = random.Random(0)
    prompt = min(64, context // 4)
    for number in range(count):
        lengths = [context - prompt] * long + [min(SHORT, context - prompt)] * (group - long)
        data = {"lengths": lengths, "prompt": [dice.randrange(vocabulary) for _ in range(prompt)]}
        yield Task(id=str(number), prompt="", data=data)


# ── Running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def write_model(case: Case, folder: Path, device: str) -> None:
    """In a process of its own, so that what it takes is free before the run."""
    import torch

    from headrace.bench.engine.shapes import random_weights
    from headrace.bench.small_model import write_tokenizer
    from headrace.models import ModelConfig, save_model

    size = case.shape
    config = ModelConfig(
        family="qwen3",
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        intermediate_size=size["inner"],
        num_layers=size["layers"],
        num_heads=size["heads"],
        num_kv_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        qk_norm=True,
        tie_embeddings=size["hidden"] < 4096,
        max_position_embeddings=40_960,
    )
    folder.mkdir(parents=True)
    save_model(random_weights(config, torch.device(device)), config, folder)
    write_tokenizer(folder, size["vocabulary"])


def settings(case: Case, model: Path) -> str:
    lora = f"[training.lora]\nrank = {case.lora}\n" if case.lora else ""
    return f"""
[model]
path = "{model}"
[tasks]
type = "python"
source = "{Path(__file__).absolute()}:tasks"
[tasks.options]
count = {4 * case.groups * (case.steps + 2)}
context = {case.context}
group = {case.group}
long = {case.long}
vocabulary = {case.shape["vocabulary"]}
[environment]
source = "headrace.bench.workload:GivenLengths"
max_tokens = {case.context - min(64, case.context // 4)}
[scorer]
source = "headrace.bench.workload:waiting_score"
[engine]
max_context = {case.context}
{f"max_running = {case.running}" if case.running else ""}
[training]
steps = {case.steps}
groups_per_batch = {case.groups}
group_size = {case.group}
{lora}"""


def run_case(case: Case, scratch: Path, device: str) -> list[dict[str, Any]]:
    # What a run leaves may fill a disk by itself; its model may lie in memory then.
    folder, file = scratch / "run", scratch / f"{case.name}.toml"
    model = (in_memory(case) or scratch) / f"headrace-model-{case.name}"
    shutil.rmtree(model, ignore_errors=True)
    command = [sys.executable, __file__, "write", case.name, str(model), device]
    subprocess.run(command, check=True, stdout=sys.stderr)
    file.write_text(settings(case, model))
    rows = run_file(case.name, file, folder)
    shutil.rmtree(model)
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def in_memory(case: Case) -> Path | None:
    """The folder of files in memory, where a model of this size leaves at least as much again free there."""
    size, shared = case.shape, Path("/dev/shm")
    layer = size["hidden"] * (2 * size["heads"] + 2 * size["kv_heads"]) * size["head_dim"]
    layer += 3 * size["hidden"] * size["inner"]
    weights = 2 * (size["layers"] * layer + 2 * size["vocabulary"] * size["hidden"])
    large = weights > 4 * 2**30
    return shared if large and shared.is_dir() and shutil.disk_usage(shared).free > 2 * weights else None


def run_file(name: str, file: Path, folder: Path, *sets: str) -> list[dict[str, Any]]:
    """Rows of its processes; one that says why where the run did not end well."""
    command = [sys.executable, "-m", "headrace", "train", str(file), "--run", str(folder), "--json"]
    done = subprocess.run([*command, *(word for one in sets for word in ("--set", one))], stdout=subprocess.PIPE)
    if done.returncode:
        return [{"case": name, "process": "–", "where": "–", "finished": False}]
    summary = json.loads(done.stdout)
    chosen = tomllib.loads((folder / "config.toml").read_text())
    return [
        {
            "case": name,
            "process": process,
            "where": where,
            "planned_gib": both["planned"][where] / 2**30,
            "measured_gib": both["measured"][where] / 2**30,
            "plan_over_measured": both["planned"][where] / both["measured"][where],
            "finished": True,
            "micro_batch_tokens": chosen["training"]["micro_batch_tokens"],
            "recompute": chosen["training"]["recompute"],
            "cache_tokens": chosen["engine"]["cache_tokens"],
        }
        for process, both in summary["memory"].items()
        for where in ("device", "host")
        if both["planned"].get(where) and both["measured"].get(where)
    ]


def quickstart(scratch: Path) -> list[dict[str, Any]]:
    model = scratch / "quickstart-model"
    subprocess.run([sys.executable, "examples/quickstart/prepare.py", str(model)], check=True, stdout=sys.stderr)
    file = Path("examples/quickstart/quickstart.toml")
    return run_file("quickstart", file, scratch / "quickstart", f"model.path={model}")


def main(words: list[str]) -> None:
    kind, *names = words or ["cpu"]
    if kind == "write":
        case = next(case for case in (*GPU, *CPU) if case.name == names[0])
        write_model(case, Path(names[1]), names[2])
        return
    cases = [case for case in (GPU if kind == "gpu" else CPU) if not names or case.name in names]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if kind == "cpu" and (not names or "quickstart" in names):
            rows += quickstart(Path(folder))
        for case in cases:
            print(f"memory_plan: {case.name} …", file=sys.stderr, flush=True)
            rows += run_case(case, Path(folder), "cuda" if kind == "gpu" else "cpu")
    import torch  # noqa: F401 - its version is part of the result

    from headrace.bench import result

    print(json.dumps(result("memory_plan", rows, figures(rows, "device" if kind == "gpu" else "host")), indent=1))


def figures(rows: list[dict[str, Any]], where: str) -> dict[str, float]:
    tried = {row["case"] for row in rows}
    finished = {row["case"] for row in rows if row["finished"]}
    ratios = [row["plan_over_measured"] for row in rows if row["finished"] and row["where"] == where]
    return {
        "default_runs_tried": len(tried),
        "default_runs_finished": len(finished),
        "plan_over_measured_min": min(ratios, default=0.0),
        "plan_over_measured_max": max(ratios, default=0.0),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
