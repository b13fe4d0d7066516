"""Training steps with a publication after each beside steps without, in one run of real processes.

    trainer's process ── publishes beside its next step ──▶ engine's process, which generates all the while

The same batch, sampled by that engine, is trained again and again, in blocks of steps that publish and that do not.
Blocks next to each other are compared, and the median of those ratios is taken: what else the machine does changes
slowly beside them. A publication that outlasts the next step is waited for, so every version is published.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.bench.pair import DEADLINE_S, ended, pair
from headrace.bench.small_model import write_tokenizer
from headrace.bench.sync import lesson
from headrace.bench.sync.served import all_have
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.remote import RemoteEngine
from headrace.errors import Superseded
from headrace.models import ModelConfig, save_model
from headrace.records import Batch, Episode, Group, Task, Turn, WeightVersion
from headrace.scoring.advantages import group_advantages
from headrace.sync.base import Destination
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Published, Publisher
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.remote import RemoteTrainer


@dataclass(frozen=True)
class Work:
    """A batch of `groups` times `group_size` completions, and how often it is trained."""

    shape: str
    """Of `bench.engine.shapes`, or "quickstart": its model's and its batch's sizes."""
    groups: int = 32
    group_size: int = 8
    prompt: int = 12
    completion: int = 13
    running: int = 256
    """Sequences that the engine generates meanwhile."""
    blocks: int = 40
    """Of each kind."""
    steps: int = 3
    """In a block, after one that is not counted."""


QUICKSTART = Work("quickstart")
ON_GPU = Work("0.6b", groups=2, prompt=256, completion=512, blocks=12)
TINY = Work("quickstart", groups=2, group_size=4, running=4, blocks=2)
TINY_ON_GPU = Work("tiny", groups=2, group_size=4, running=4, blocks=2)


def measure(work: Work, device: str, seed: int = 0) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures). `device` is "cpu" or "cuda"."""
    row = asyncio.run(_measure(work, device, seed))
    name = "gpu" if device == "cuda" else "cpu"
    return [drive.kept(row)], {f"step_time_ratio_{name}": row["ratio"]}


async def _measure(work: Work, device: str, seed: int) -> dict[str, Any]:
    drive.say(f"steps {work.shape} on {device}: with and without publication …")
    async with _processes(work, device, seed) as (trainer, engine, vocabulary):
        publisher = Publisher(SyncConfig(deadline_s=DEADLINE_S))

        async def publish(number: int) -> Published:
            version = WeightVersion(number=number, parent=number - 1, step=number)
            to = [Destination(name=engine.name, version=engine.version)]
            manifest = await trainer.stage(version, to)
            return all_have(await publisher.publish(manifest, trainer.seal(number), [engine]))

        await publish(0)
        requests = _requests(work, vocabulary, seed)
        batch = await _batch(work, engine, requests, seed)
        firsts = (1 + place * work.completion // work.running for place in range(work.running))
        load = [asyncio.create_task(_generate(engine, requests, first)) for first in firsts]
        number = 0
        published: list[Published] = []

        async def over(publishing: asyncio.Task[Published]) -> None:
            # As in a run: a step that is over before its version was asked for leaves the next one to be published.
            with suppress(Superseded):
                published.append(await publishing)

        async def block(publishing: bool) -> list[float]:
            """Seconds of each step, from one's end to the next one's."""
            nonlocal number
            under_way: asyncio.Task[Published] | None = None
            seconds = []
            begun = time.perf_counter()
            for _ in range(work.steps + 1):
                await trainer.train(msgspec.structs.replace(batch, step=number + 1, version=number))
                number += 1
                if under_way is not None:
                    await over(under_way)
                if publishing:
                    under_way = asyncio.create_task(publish(number))
                seconds.append(time.perf_counter() - begun)
                begun = time.perf_counter()
            if under_way is not None:
                await over(under_way)
            return seconds[1:]

        # The first blocks warm both ways up.
        for publishing in (False, True):
            await block(publishing)
        published.clear()
        pairs: list[Pair] = []
        for index in range(work.blocks):
            both = {publishing: await block(publishing) for publishing in ((False, True), (True, False))[index % 2]}
            pairs.append((both[False], both[True]))
        usage = await engine.usage()
        await ended(load)
    return {
        "part": "steps",
        "shape": work.shape,
        "device": device,
        "tokens_in_batch": work.groups * work.group_size * (work.prompt + work.completion),
        "generating": usage.running,
        "steps_of_each": work.blocks * work.steps,
        "published": len(published),
        **compared(pairs),
        "sync_ms": 1e3 * statistics.median(one.seconds for one in published),
        "pause_ms_max": 1e3 * max(one.pause_s for one in published),
    }


Pair = tuple[list[float], list[float]]
"""Seconds of the steps of two blocks next to each other: without publications, and with them."""


def compared(pairs: Sequence[Pair]) -> dict[str, float]:
    """The typical step of each kind, and how much longer one with a publication takes."""
    without, with_sync = (
        statistics.median(itertools.chain.from_iterable(kind)) for kind in zip(*pairs, strict=True)
    )
    ratios = [statistics.median(with_) / statistics.median(without_) for without_, with_ in pairs]
    return {
        "step_ms_without": 1e3 * without,
        "step_ms_with": 1e3 * with_sync,
        "ratio": statistics.median(ratios),
        "ratio_of_medians": with_sync / without,
    }


def _requests(work: Work, vocabulary: int, seed: int) -> itertools.chain[SampleRequest]:
    dice = np.random.default_rng(seed)

    def made() -> Any:
        for number in itertools.count():
            context = dice.integers(0, vocabulary, work.prompt).astype(np.int32)
            yield SampleRequest(id=number, context=context, max_tokens=work.completion, seed=number)

    return itertools.chain(made())


async def _generate(engine: RemoteEngine, requests: Any, first: int) -> None:
    """One after another. Each task's first has another length, so that the load is always the same."""
    await engine.sample(msgspec.structs.replace(next(requests), max_tokens=first))
    while True:
        await engine.sample(next(requests))


async def _batch(work: Work, engine: RemoteEngine, requests: Any, seed: int) -> Batch:
    """Sampled by the engine; rewards are drawn."""
    dice = np.random.default_rng(seed)
    groups = []
    for number in range(work.groups):
        first: SampleRequest = next(requests)
        asked = [first, *(_again(first, next(requests)) for _ in range(work.group_size - 1))]
        turns: list[Turn] = list(await asyncio.gather(*map(engine.sample, asked)))
        task = Task(id=str(number), prompt="")
        episodes = tuple(
            Episode(id=f"{number}.{place}", task=task, turns=(turn,), reward=float(dice.random()))
            for place, turn in enumerate(turns)
        )
        groups.append(Group(id=str(number), sequence=number, task=task, episodes=episodes))
    return Batch(step=1, version=0, groups=tuple(groups), advantages=group_advantages(groups, True))


def _again(request: SampleRequest, other: SampleRequest) -> SampleRequest:
    """The other one, on the same prompt."""
    return msgspec.structs.replace(other, context=request.context)


@asynccontextmanager
async def _processes(work: Work, device: str, seed: int) -> AsyncIterator[tuple[RemoteTrainer, RemoteEngine, int]]:
    """A trainer and an engine, and the size of the vocabulary."""
    longest = work.prompt + work.completion
    training = TrainingConfig(
        groups_per_batch=work.groups,
        group_size=work.group_size,
        optimizer=OptimizerConfig(learning_rate=1e-6),
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if device == "cuda" else "float32",
    )
    engine = NativeEngineConfig(
        device=training.device,
        dtype=training.dtype,
        max_running=work.running,
        max_context=longest,
        cache_tokens=(work.running + 8) * (longest + 64),
    )
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch) / "model"
        config = _make_model(folder, work, device, seed)
        async with pair(folder, training, engine, seed=seed) as (trainer, remote):
            yield trainer, remote, config.vocab_size


def _make_model(folder: Path, work: Work, device: str, seed: int) -> ModelConfig:
    if work.shape == "quickstart":
        lesson.make_model(folder, hidden=64, layers=2, seed=seed, warm_steps=0)
        return lesson.model_config(64, 2)
    config = config_of(work.shape)
    folder.mkdir(parents=True)
    save_model(random_weights(config, torch.device(device), seed), config, folder)
    write_tokenizer(folder, lesson.WORDS)
    drive.free_memory()
    return config
