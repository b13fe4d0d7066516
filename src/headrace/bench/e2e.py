"""`headrace bench e2e`: generation and training on one device, beside what each reaches there alone.

    alone            the engine, its slots always full: g tokens a second; the trainer: t
    synchronous      each batch is generated and then trained on; sizes are doubled while that gains something
    asynchronous     both go on at once, side by side
    turns            the same with `placement = "turns"`: while a batch is trained the engine sleeps

Taking turns without any loss the two train on 1 / (1/g + 1/t) tokens a second, which is called ideal here; where
kernels of both run at the same time, more is possible. A synchronous run loses the time in which fewer and fewer
sequences run (`tail_s`) and that in which neither side works (`waiting_s`): without these it would be faster by the
gain that is allowed. What the asynchronous run reaches of that differs from what it reaches of the ideal by the
trainer's speed alone, there the synchronous run's own, and hardly depends on the size. Lengths are log-normal, as
in the engine's request mix.

On a CPU the two have half of the cores each, taking turns all of them, so that there are rows and no figures.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from headrace.bench import result
from headrace.bench.batches import Asked, random_batch, random_tokens
from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.bench.pair import ended, pair
from headrace.bench.small_model import write_tokenizer
from headrace.bench.window import Window, window
from headrace.bench.workload import VOCABULARY
from headrace.buffer.config import BufferConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.remote import RemoteEngine
from headrace.errors import ConfigError, HeadraceError
from headrace.models import save_model
from headrace.orchestration.local import train
from headrace.records import Batch
from headrace.rollout.config import EnvironmentConfig, PythonTasks
from headrace.scoring.config import ScorerConfig
from headrace.sync.config import SyncConfig
from headrace.telemetry.config import RecordingConfig
from headrace.telemetry.folder import RunFolder
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.remote import RemoteTrainer

PARTS = ("async", "turns", "sync")
NAMES = {"async": "asynchronous", "turns": "asynchronous, in turns", "sync": "synchronous"}
ENOUGH = 0.05
"""Sizes of synchronous batches end with the first that gains less."""
LOOKS = 20
"""At the engine alone: how many sequences run."""


@dataclass(frozen=True)
class Load:
    shape: str = "0.6b"
    groups: int = 64
    """Of a batch of the asynchronous run."""
    group_size: int = 8
    prompt: int = 256
    median: int = 256
    sigma: float = 1.0
    cap: int = 8192
    running: int = 256
    """Sequences that the engine decodes together."""
    max_staleness: int = 16
    """A completion of `cap` tokens takes as long as so many steps."""
    steps: int = 15
    skipped: int = 5
    left_out: int = 3
    """Steps of the asynchronous run; how many of them fill the pipeline, and how many drain it."""
    sync_groups: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Of a synchronous batch, until one gains less than `ENOUGH`."""
    sync_steps: int = 2
    """Counted of each synchronous run, after a first one."""
    warm_s: float = 6.0
    alone_s: float = 12.0

    @property
    def longest(self) -> int:
        return self.prompt + self.cap

    @property
    def cache_tokens(self) -> int:
        # As if each were at its end: twice what they are on average.
        met = self.met_lengths(np.random.default_rng(0), 10_000).mean()
        return max(self.longest, round(self.running * (self.prompt + met)))

    def lengths(self, dice: np.random.Generator, count: int) -> np.ndarray:
        drawn = self.median * np.exp(dice.normal(0.0, self.sigma, count))
        return np.clip(np.rint(drawn), 1, self.cap).astype(np.int64)

    def met_lengths(self, dice: np.random.Generator, count: int) -> np.ndarray:
        """Of sequences that run at a given time: the longer one is, the likelier it is met."""
        drawn = self.lengths(dice, 100_000)
        return dice.choice(drawn, count, p=drawn / drawn.sum())


ON_GPU = Load()
TINY = Load(
    shape="tiny", groups=4, group_size=4, prompt=8, median=8, cap=32, running=16, max_staleness=4, steps=8,
    skipped=2, left_out=1, sync_groups=(2, 4), sync_steps=2, warm_s=0.2, alone_s=0.5,
)  # fmt: skip


def run(
    parts: str = "async,turns,sync",
    shape: str = "",
    device: str = "auto",
    groups: int = 0,
    sync_groups: str = "",
    steps: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """What each side reaches alone, and the runs that are asked for; on a CPU of a tiny model."""
    wanted = [part.strip() for part in str(parts).split(",")]
    for part in wanted:
        if part not in PARTS:
            raise ConfigError("a part of bench e2e is one of those known", part, f"known: {', '.join(PARTS)}")
    place = drive.device_of(device)
    load = ON_GPU if place.type == "cuda" else TINY
    given: dict[str, Any] = {"shape": shape, "groups": groups, "steps": steps}
    load = replace(load, **{name: value for name, value in given.items() if value})
    if sync_groups:
        load = replace(load, sync_groups=tuple(int(number) for number in str(sync_groups).split(",")))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        return _measure(_Bench(Path(scratch), load, place, seed), wanted, enough=None if sync_groups else ENOUGH)


def _measure(bench: _Bench, wanted: list[str], enough: float | None) -> dict[str, Any]:
    load = bench.load
    engine, running, trainer = asyncio.run(bench.alone())
    alone = Alone(engine, trainer)
    rows = [
        drive.kept(
            {
                "part": "alone",
                "shape": load.shape,
                "running": running,
                "engine_tokens_per_s": engine,
                "trainer_tokens_per_s": trainer,
                "ideal_tokens_per_s": alone.ideal,
            }
        )
    ]
    figures: dict[str, float] = {}
    runs: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for part in (part for part in PARTS if part in wanted):
        for groups in load.sync_groups if part == "sync" else (load.groups,):
            runs[part].append(drive.kept(row_of(NAMES[part], groups, bench.run(groups, part), alone)))
            if enough is not None and not still_gains(runs[part], enough):
                break
    if bench.place.type == "cuda" and runs["async"]:
        figures = figures_of(runs["async"][0], runs["sync"], runs["turns"])
    return result("e2e", [*rows, *itertools.chain(*runs.values())], figures)


def figures_of(
    asynchronous: dict[str, Any], synchronous: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> dict[str, float]:
    figures = {"e2e_over_ideal": asynchronous["over_ideal"]}
    if synchronous:
        best = max(synchronous, key=lambda row: row["trained_tokens_per_s"])
        gain = asynchronous["trained_tokens_per_s"] / best["trained_tokens_per_s"]
        figures |= {"async_over_sync_gpu": gain, "async_gain_over_allowed": gain / best["gain_allowed"]}
    if turns:
        # Above 1: what `placement` is unless set is the better choice here.
        figures["side_by_side_over_turns"] = asynchronous["trained_tokens_per_s"] / turns[0]["trained_tokens_per_s"]
    return figures


def still_gains(rows: list[dict[str, Any]], enough: float) -> bool:
    """Whether the last was that much faster than the one before."""
    rates = [row["trained_tokens_per_s"] for row in rows]
    return len(rates) < 2 or rates[-1] >= (1 + enough) * rates[-2]


class Alone(NamedTuple):
    """Tokens a second, the engine's with its slots full."""

    engine: float
    trainer: float

    @property
    def ideal(self) -> float:
        """Of a device whose time goes to one or the other, and to nothing else."""
        return 1 / (1 / self.engine + 1 / self.trainer)


def row_of(name: str, groups: int, seen: Window, alone: Alone) -> dict[str, Any]:
    """Where the time of a step went. What a side is busy for longer than alone (`…_beyond_s`): where both work at
    once it waits for the other's kernels; a synchronous run's engine has its tail; in turns caches are computed
    again."""
    row = {
        "part": "runs",
        "run": name,
        "groups": groups,
        "steps": seen.steps,
        "step_s": seen.wall_s / seen.steps,
        "trained_tokens_per_s": seen.tokens_per_s,
        "error_frac": seen.error_frac,
        "over_ideal": seen.tokens_per_s / alone.ideal,
        "generation_s": seen.engine["busy"] / seen.steps,
        "generation_beyond_s": (seen.engine["busy"] - seen.tokens / alone.engine) / seen.steps,
        "training_s": seen.trainer["busy"] / seen.steps,
        "training_beyond_s": (seen.trainer["busy"] - seen.tokens / alone.trainer) / seen.steps,
        "engine_idle_frac": seen.engine["idle"] / seen.wall_s,
        "trainer_idle_frac": seen.trainer["idle"] / seen.wall_s,
        "engine_overhead_frac": seen.engine["overhead"] / seen.wall_s,
        "trainer_overhead_frac": seen.trainer["overhead"] / seen.wall_s,
        "staleness_mean": seen.staleness_mean,
        "staleness_max": seen.staleness_max,
    }
    if name == "synchronous":
        tail = seen.engine["busy"] - seen.tokens / alone.engine
        waiting = seen.wall_s - seen.engine["busy"] - seen.trainer["busy"]
        row |= {"tail_s": tail / seen.steps, "waiting_s": waiting / seen.steps}
        row["gain_allowed"] = seen.wall_s / (seen.wall_s - tail - waiting)
    return row


class _Bench:
    def __init__(self, scratch: Path, load: Load, place: torch.device, seed: int):
        self.load, self.place, self._seed = load, place, seed
        self._scratch, self._model = scratch, scratch / "model"
        config = config_of(load.shape)
        self._model.mkdir()
        save_model(random_weights(config, place, seed), config, self._model)
        # Prompts are of its words alone; it has no end of a sequence, so completions are as long as they may be.
        write_tokenizer(self._model, VOCABULARY)
        drive.free_memory()

    # ── Each side alone ──────────────────────────────────────────────────────────────────────────────────

    async def alone(self) -> tuple[float, float, float]:
        """(the engine's tokens a second, sequences that ran on average, the trainer's tokens a second), in turns,
        in processes as a run has them."""
        drive.say("e2e: each side alone …")
        async with pair(self._model, self._training(self.load.groups, 1), self._engine(), seed=self._seed) as both:
            return *await self._engine_alone(both.engine), await self._trainer_alone(both.trainer)

    async def _engine_alone(self, engine: RemoteEngine) -> tuple[float, float]:
        load, numbers = self.load, itertools.count()
        dice = np.random.default_rng(self._seed)
        later = self._requests(dice)

        async def one_after_another(first: Asked) -> None:
            for context, tokens in itertools.chain([first], later):
                number = next(numbers)
                await engine.sample(SampleRequest(id=number, context=context, max_tokens=tokens, seed=number))

        # As they are met at any time later, somewhere on their way; and half as many that wait for a slot.
        firsts = []
        for length in load.met_lengths(dice, load.running).tolist():
            done = int(dice.integers(0, length))
            firsts.append((random_tokens(dice, VOCABULARY, load.prompt + done), length - done))
        firsts += itertools.islice(later, load.running // 2)
        tasks = [asyncio.create_task(one_after_another(first)) for first in firsts]
        await asyncio.sleep(load.warm_s)
        seen, begun = [await engine.usage()], time.perf_counter()
        for _ in range(LOOKS):
            await asyncio.sleep(load.alone_s / LOOKS)
            seen.append(await engine.usage())
        seconds = time.perf_counter() - begun
        await ended(tasks)
        return (seen[-1].tokens - seen[0].tokens) / seconds, statistics.mean(usage.running for usage in seen)

    async def _trainer_alone(self, trainer: RemoteTrainer) -> float:
        batch = self._batch()
        tokens = sum(len(turn.tokens) for episode in batch.episodes for turn in episode.turns)
        seconds = []
        for number in range(3):
            report = await trainer.train(msgspec.structs.replace(batch, step=number + 1, version=number))
            seconds.append(report.seconds)
        return tokens / (sum(seconds[1:]) / 2)

    def _requests(self, dice: np.random.Generator) -> Iterator[Asked]:
        """Groups of one prompt, one after another."""
        while True:
            prompt = random_tokens(dice, VOCABULARY, self.load.prompt)
            for length in self.load.lengths(dice, self.load.group_size).tolist():
                yield prompt, length

    def _batch(self) -> Batch:
        load, dice = self.load, np.random.default_rng(self._seed)
        requests = self._requests(dice)
        groups = [list(itertools.islice(requests, load.group_size)) for _ in range(load.groups)]
        return random_batch(dice, config_of(load.shape).vocab_size, groups)

    # ── Runs ─────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, groups: int, part: str) -> Window:
        load, synchronous = self.load, part == "sync"
        steps, *outside = (1 + load.sync_steps, 1, 0) if synchronous else (load.steps, load.skipped, load.left_out)
        drive.say(f"e2e: {NAMES[part]}, batches of {groups} groups …")
        folder = self._scratch / f"{part}-{groups}"
        summary = train(self._config(groups, steps, part), folder=folder, progress=True)
        if not summary["finished"]:
            raise HeadraceError("the benchmark was stopped", NAMES[part])
        seen = window(RunFolder(folder).read_metrics(), *outside)
        shutil.rmtree(folder)
        return seen

    def _config(self, groups: int, steps: int, part: str) -> RunConfig:
        load, on_gpu = self.load, self.place.type == "cuda"
        bounded = BufferConfig(type="bounded", max_staleness=load.max_staleness, order="first_finished")
        options = {
            "count": groups * (steps + load.max_staleness + 2),
            "group_size": load.group_size,
            "median": load.median,
            "sigma": load.sigma,
            "cap": load.cap,
            "seed": self._seed,
            "prompt_tokens": load.prompt,
        }
        return RunConfig(
            model=ModelConfig(path=str(self._model)),
            tasks=PythonTasks(source="headrace.bench.workload:tasks", options=options),
            environment=EnvironmentConfig(source="headrace.bench.workload:GivenLengths", max_tokens=load.cap),
            scorer=ScorerConfig(source="headrace.bench.workload:waiting_score", concurrency=4096),
            engine=self._engine(),
            buffer=BufferConfig(type="none") if part == "sync" else bounded,
            placement="turns" if part == "turns" else "side_by_side",
            training=self._training(groups, steps),
            sync=SyncConfig(transport="cuda_ipc" if on_gpu else "shared_memory"),
            recording=RecordingConfig(episodes=0.0, tensorboard=False, keep_versions_every=10**6),
            seed=self._seed,
        )

    def _engine(self) -> NativeEngineConfig:
        load, on_gpu = self.load, self.place.type == "cuda"
        return NativeEngineConfig(
            device="cuda" if on_gpu else "cpu",
            dtype="bfloat16" if on_gpu else "float32",
            max_running=load.running,
            max_context=load.longest,
            cache_tokens=load.cache_tokens,
        )

    def _training(self, groups: int, steps: int) -> TrainingConfig:
        on_gpu = self.place.type == "cuda"
        return TrainingConfig(
            steps=steps,
            groups_per_batch=groups,
            group_size=self.load.group_size,
            device="cuda" if on_gpu else "cpu",
            dtype="bfloat16" if on_gpu else "float32",
            optimizer=OptimizerConfig(learning_rate=1e-6),
            checkpoint_every=steps,
        )
