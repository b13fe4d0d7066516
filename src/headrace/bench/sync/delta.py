"""What changed between versions: bytes that a real run published beside their entropy; how fast they are coded.

The run trains a bfloat16 model (float32 master weights, AdamW, learning rate 3e-6) by reinforcement on the task of
lesson.py, publishes what changed after each step, and keeps every version's weights. From those the entropy of
(changed positions, new values) is computed. Every version was verified by its checksums when it arrived: lossless.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of
from headrace.bench.sync import lesson
from headrace.buffer.config import BufferConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.engine.config import NativeEngineConfig
from headrace.errors import HeadraceError
from headrace.models import parameter_shapes
from headrace.orchestration.local import train
from headrace.rollout.config import EnvironmentConfig, PythonTasks
from headrace.scoring.config import ScorerConfig
from headrace.sync import lay_out
from headrace.sync.base import TensorSpec
from headrace.sync.config import SyncConfig
from headrace.sync.payload.delta import Region, apply, delta_entropy, encode, frames
from headrace.sync.payload.full import image_of, pack
from headrace.telemetry.config import RecordingConfig
from headrace.telemetry.folder import RunFolder
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig

LEARNING_RATE = 3e-6
ROUNDS = 3


@dataclass(frozen=True)
class Run:
    """A run to look at; versions are counted once `skipped` steps have passed."""

    hidden: int = 256
    layers: int = 6
    steps: int = 40
    skipped: int = 20
    groups: int = 16
    group_size: int = 8


TINY = Run(hidden=32, layers=2, steps=6, skipped=2, groups=4, group_size=4)


def measure(
    shape: str = "0.6b", run: Run | None = None, seed: int = 0
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures). The shape is that of the image on which coding is timed."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        row = drive.kept(published(Path(scratch), run or Run(), seed))
    figures = {"delta_frac": row["delta_frac"], "delta_over_entropy": row["over_entropy"]}
    return [row, drive.kept(coding(shape, row["changed_frac"], seed))], figures


def published(scratch: Path, run: Run, seed: int) -> dict[str, Any]:
    """The bytes of versions that a run published, beside the whole image's and their entropy."""
    parameters = lesson.make_model(scratch / "model", hidden=run.hidden, layers=run.layers, seed=seed)
    drive.say(f"delta: {run.steps} steps of a model of {parameters / 1e6:.3g} M parameters …")
    summary = train(run_config(scratch / "model", run, seed), folder=scratch / "run", progress=True)
    if not summary["finished"]:
        raise HeadraceError("the benchmark was stopped", summary["steps"])
    folder = RunFolder(scratch / "run")
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    sent = [event for event in events if event["kind"] == "published"]
    fracs, ratios, changed = [], [], []
    for before, after in itertools.pairwise(sent):
        if after["step"] <= run.skipped:
            continue
        (specs, old), (_, new) = (_image(folder, event["version"]) for event in (before, after))
        entropy = delta_entropy(old, new, _regions(specs)) / 8
        fracs.append(after["bytes"] / len(new))
        ratios.append(after["bytes"] / entropy)
        changed.append(float((old.view(torch.int16) != new.view(torch.int16)).float().mean()))
    rewards = [line["reward_mean"] for line in folder.read_metrics()]
    few = max(1, len(rewards) // 4)
    return {
        "part": "delta",
        "parameters": parameters,
        "steps": run.steps,
        "versions": len(fracs),
        "learning_rate": LEARNING_RATE,
        "full_bytes": len(new),
        "delta_frac": statistics.mean(fracs),
        "delta_frac_max": max(fracs),
        "over_entropy": statistics.mean(ratios),
        "over_entropy_max": max(ratios),
        "changed_frac": statistics.mean(changed),
        "reward_first": statistics.mean(rewards[:few]),
        "reward_last": statistics.mean(rewards[-few:]),
    }


def coding(shape: str, changed: float, seed: int) -> dict[str, Any]:
    """How many bytes of a model are encoded and decoded in a second where that share of its elements changed."""
    drive.say(f"delta {shape}: coding …")
    kinds = {
        name: ("bfloat16", size, 2 * int(torch.Size(size).numel()))
        for name, size in parameter_shapes(config_of(shape)).items()
    }
    specs, nbytes = lay_out(kinds)
    regions = _regions(specs)
    generator = torch.Generator().manual_seed(seed)
    old = torch.zeros(nbytes, dtype=torch.uint8)
    for region in regions:
        part = region.of(old)
        part.view(torch.bfloat16).normal_(0.0, 0.02, generator=generator)
    new = old.clone()
    for region in regions:
        part = region.of(new)
        places = torch.randint(region.count, (round(region.count * changed),), generator=generator)
        part[places] += 2 * torch.randint(2, places.shape, generator=generator).to(torch.int16) - 1
    encoding, decoding = [], []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        coded = encode(old, new, [Region(0, 2, nbytes // 2)])
        encoding.append(time.perf_counter() - begun)
        target = old.clone()
        begun = time.perf_counter()
        for frame in frames(memoryview(part) for part in coded):
            apply(frame, frame.of(target))
        decoding.append(time.perf_counter() - begun)
        if not torch.equal(target, new):
            raise HeadraceError("a delta is lossless", shape)
    return {
        "part": "coding",
        "shape": shape,
        "gb": nbytes / 1e9,
        "changed_frac": changed,
        "delta_frac": sum(map(len, coded)) / nbytes,
        "encode_gb_s": nbytes / 1e9 / min(encoding),
        "decode_gb_s": nbytes / 1e9 / min(decoding),
    }


def run_config(
    model: Path,
    run: Run,
    seed: int,
    *,
    payload: Literal["delta", "adapter"] = "delta",
    lora: LoraConfig | None = None,
) -> RunConfig:
    """A run on the task of lesson.py that keeps every version."""
    tokens = lesson.PROMPT_TOKENS + lesson.COMPLETION_TOKENS
    return RunConfig(
        model=ModelConfig(path=str(model)),
        tasks=PythonTasks(
            source="headrace.bench.sync.lesson:tasks", options={"count": run.groups * run.steps, "seed": seed}
        ),
        environment=EnvironmentConfig(max_tokens=lesson.COMPLETION_TOKENS),
        scorer=ScorerConfig(source="headrace.bench.sync.lesson:score"),
        engine=NativeEngineConfig(
            device="cpu", dtype="bfloat16", max_context=tokens + 7, max_running=2 * run.groups * run.group_size
        ),
        buffer=BufferConfig(type="bounded", max_staleness=2),
        training=TrainingConfig(
            steps=run.steps,
            groups_per_batch=run.groups,
            group_size=run.group_size,
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
            lora=lora,
            device="cpu",
            dtype="bfloat16",
            checkpoint_every=run.steps,
        ),
        sync=SyncConfig(payload=payload, anchor_every=run.steps + 1),
        recording=RecordingConfig(episodes=0.0, tensorboard=False, keep_versions_every=1, keep_versions_gib=16.0),
        seed=seed,
    )


def _image(folder: RunFolder, number: int) -> tuple[tuple[TensorSpec, ...], Tensor]:
    """A kept version as it was published."""
    tensors: Mapping[str, Tensor] = load_file(folder.versions / f"{number:07d}.safetensors")
    specs, nbytes = image_of(tensors, torch.bfloat16)
    image = torch.zeros(nbytes, dtype=torch.uint8)
    pack(specs, tensors, image)
    return specs, image


def _regions(specs: tuple[TensorSpec, ...]) -> list[Region]:
    """One for each tensor."""
    return [Region(spec.offset, 2, spec.nbytes // 2) for spec in specs]
