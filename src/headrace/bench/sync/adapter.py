"""A LoRA adapter alone: the bytes that move, and on a GPU how soon an engine under load serves it.

By shapes: the tensors of an adapter of rank 32 on all seven projections beside the whole model's. In a run: what
was published beside the adapter's own bytes. Under load: the adapter is in float32 here, as a trainer has
it; its time runs from the beginning of its publication to the engine's acknowledgement, between two decode steps.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of
from headrace.bench.sync import lesson
from headrace.bench.sync.delta import TINY, Run, run_config
from headrace.bench.sync.served import all_have, served, stages_ms
from headrace.errors import HeadraceError
from headrace.models import ModelConfig, parameter_shapes
from headrace.orchestration.local import train
from headrace.sync import lay_out, open_channel, open_sender
from headrace.sync.base import AdapterSpec
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Published, Publisher
from headrace.telemetry.folder import RunFolder
from headrace.training.config import LoraConfig

RANK = 32
TARGETS = LoraConfig().targets


@dataclass(frozen=True)
class Load:
    """Sequences that decode with the adapter while versions of it arrive."""

    sequences: int = 256
    context: int = 512
    versions: int = 20


TINY_LOAD = Load(sequences=4, context=256, versions=3)


def adapter_shapes(config: ModelConfig, rank: int = RANK) -> dict[str, tuple[int, int]]:
    """Of the tensors of an adapter on all projections, by PEFT's names."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in parameter_shapes(config).items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS) and name.endswith(".weight"):
            shapes[f"base_model.model.{module}.lora_A.weight"] = rank, shape[1]
            shapes[f"base_model.model.{module}.lora_B.weight"] = shape[0], rank
    return shapes


def measure_bytes(
    shape: str = "8b", run: Run = TINY, seed: int = 0
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures), on any machine."""
    config = config_of(shape)
    adapter, full = adapter_shapes(config), parameter_shapes(config)
    by_shape = _bytes_row(
        f"{shape}, by its shapes", _image_bytes(adapter), _tensor_bytes(adapter), _image_bytes(full)
    )
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        in_a_run = _published(Path(scratch), run, seed)
    return [drive.kept(by_shape), drive.kept(in_a_run)], {"adapter_frac": by_shape["adapter_frac"]}


def measure_live(
    shape: str = "8b", device: str = "cuda", load: Load | None = None, seed: int = 0
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures). Through CUDA IPC where the device is "cuda", otherwise through shared memory."""
    return asyncio.run(_measure_live(shape, device, load or Load(), seed))


async def _measure_live(
    shape: str, device: str, load: Load, seed: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    drive.say(f"adapter {shape}: live under load …")
    config = config_of(shape)
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {
        name: 1e-3 * torch.randn(size, device=device, generator=generator)
        for name, size in adapter_shapes(config).items()
    }
    spec = AdapterSpec(name="policy", rank=RANK, alpha=2.0 * RANK, targets=TARGETS)
    channel = open_channel("cuda_ipc" if device == "cuda" else "shared_memory")
    sender = open_sender(channel, payload="adapter", dtype="bfloat16")
    publisher = Publisher(SyncConfig(deadline_s=30.0))
    longest = 3 * load.context
    size: dict[str, Any] = {
        "running": load.sequences,
        "context": longest,
        "cache_tokens": load.sequences * (longest + drive.SPARE_TOKENS),
    }
    async with served(shape, device, channel, **size, max_adapters=1, max_adapter_rank=RANK) as there:

        async def publish() -> tuple[float, Published]:
            """As the trainer does it: the engine hears of the version while it is being packed."""
            version, to = there.next_version()
            begun = time.perf_counter()
            manifest = sender.stage(version, tensors, adapter=spec, to=to)
            published = await publisher.publish(manifest, asyncio.to_thread(sender.pack), [there.engine])
            return time.perf_counter() - begun, all_have(published)

        for _ in range(3):
            await publish()
        async with there.busy(load.sequences, load.context, 2 * load.context, config.vocab_size, adapter=spec.name):
            step_ms = await there.step_ms()
            await there.gaps_ms()
            done = []
            for _ in range(load.versions):
                done.append(await publish())
                await asyncio.sleep(0.05)
            gaps = await there.gaps_ms()
    sender.close()
    os.close(channel["descriptor"])
    total = [1e3 * seconds for seconds, _ in done]
    host_pause_ms = 1e3 * max(published.pause_s for _, published in done)
    row = drive.kept(
        {
            "part": "adapter live",
            "shape": shape,
            "rank": RANK,
            "load": f"{load.sequences} sequences",
            "mb": _image_bytes(adapter_shapes(config)) / 1e6,
            "total_ms": statistics.median(total),
            "total_ms_max": max(total),
            "decode_step_ms": step_ms,
            "beyond_two_steps_ms": statistics.median(total) - 2 * step_ms,
            "host_pause_ms": host_pause_ms,
            **({"device_gap_ms_max": max(gaps)} if gaps else {}),
            **stages_ms(published for _, published in done),
        }
    )
    figures = {
        "adapter_live_ms": row["beyond_two_steps_ms"],
        "adapter_pause_ms": max(gaps, default=host_pause_ms),
    }
    return [row], figures


def _published(scratch: Path, run: Run, seed: int) -> dict[str, Any]:
    """What a run with an adapter published, every version of it."""
    parameters = lesson.make_model(scratch / "model", hidden=run.hidden, layers=run.layers, seed=seed, warm_steps=1)
    drive.say(f"adapter: {run.steps} steps of an adapter …")
    config = run_config(scratch / "model", run, seed, lora=LoraConfig(rank=8), payload="adapter")
    summary = train(config, folder=scratch / "run", progress=True)
    if not summary["finished"]:
        raise HeadraceError("the benchmark was stopped", summary["steps"])
    folder = RunFolder(scratch / "run")
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    sent = {event["bytes"] for event in events if event["kind"] == "published"}
    kept = load_file(next(iter(sorted(folder.versions.glob("*.safetensors")))))
    tensors = sum(2 * tensor.numel() for tensor in kept.values())
    return _bytes_row(f"a run, {parameters / 1e6:.3g} M parameters", max(sent), tensors, 2 * parameters)


def _bytes_row(of: str, stream: int, tensors: int, full: int) -> dict[str, Any]:
    return {
        "part": "adapter",
        "of": of,
        "stream_bytes": stream,
        "stream_over_tensors": stream / tensors,
        "full_bytes": full,
        "adapter_frac": stream / full,
    }


def _tensor_bytes(shapes: dict[str, Any]) -> int:
    return sum(2 * math.prod(size) for size in shapes.values())


def _image_bytes(shapes: dict[str, Any]) -> int:
    return lay_out({name: ("bfloat16", tuple(size), 2 * math.prod(size)) for name, size in shapes.items()})[1]
