"""`headrace bench loop`: what asynchrony gains on this machine, end to end, with real processes.

One workload is run synchronously (generation and training take turns, each with all cores) and asynchronously
(max_staleness 2, half of the cores each), with a scorer that waits and with one that does not.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.bench import result
from headrace.bench.window import window
from headrace.buffer.config import BufferConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.engine.config import NativeEngineConfig
from headrace.errors import HeadraceError
from headrace.orchestration.local import train
from headrace.rollout.config import EnvironmentConfig, PythonTasks
from headrace.scoring.config import ScorerConfig
from headrace.telemetry.config import RecordingConfig
from headrace.telemetry.folder import RunFolder
from headrace.training.config import OptimizerConfig, TrainingConfig

SKIPPED_STEPS = 4
"""The first steps fill the pipeline; the figures are of those after them."""


def run(
    steps: int = 24,
    groups: int = 16,
    group_size: int = 8,
    median: int = 32,
    sigma: float = 1.0,
    hidden: int = 128,
    layers: int = 4,
    max_staleness: int = 2,
    order: str = "fifo",
    seed: int = 0,
) -> dict[str, Any]:
    """Four runs of the same workload; lengths are capped at 16 times the median."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        work = _Workload(
            Path(scratch), steps, groups, group_size, median, sigma, hidden, layers, max_staleness, order, seed
        )
        sync_free = work.measure("synchronous, free scorer", synchronous=True, wait_s=0.0)
        async_free = work.measure("asynchronous, free scorer", synchronous=False, wait_s=0.0)
        wait = sync_free["generation_s_per_step"] / 2
        sync = work.measure("synchronous, waiting scorer", synchronous=True, wait_s=wait)
        other = work.measure("asynchronous, waiting scorer", synchronous=False, wait_s=wait)
    rows = [sync_free, async_free, sync, other]
    figures = {
        "async_over_sync": other["trained_tokens_per_s"] / sync["trained_tokens_per_s"],
        "async_over_sync_free_scorer": async_free["trained_tokens_per_s"] / sync_free["trained_tokens_per_s"],
        "trainer_idle_frac_sync": sync["trainer_idle_frac"],
        "trainer_idle_frac_async": other["trainer_idle_frac"],
        "engine_idle_frac_sync": sync["engine_idle_frac"],
        "engine_idle_frac_async": other["engine_idle_frac"],
        "time_accounted_frac": min((row["time_accounted_frac"] for row in rows), key=lambda frac: -abs(frac - 1)),
    }
    return result("loop", rows, figures)


class _Workload:
    def __init__(
        self,
        scratch: Path,
        steps: int,
        groups: int,
        group_size: int,
        median: int,
        sigma: float,
        hidden: int,
        layers: int,
        max_staleness: int,
        order: Any,
        seed: int,
    ):
        self._scratch = scratch
        self._cap = 16 * median
        self._max_staleness = max_staleness
        self._order = order
        self._steps = steps
        self._groups, self._group_size = groups, group_size
        self._seed = seed
        options = {"count": groups * steps, "group_size": group_size, "median": median, "sigma": sigma}
        self._tasks = {**options, "cap": self._cap, "seed": seed}
        self._model = scratch / "model"
        arguments = f"hidden={hidden}, layers={layers}, max_positions={self._cap + 64}, seed={seed}"
        code = f"from headrace.bench.workload import *; make_model(Path({str(self._model)!r}), {arguments})"
        subprocess.run([sys.executable, "-c", code], check=True)

    def measure(self, name: str, *, synchronous: bool, wait_s: float) -> dict[str, Any]:
        print(f"headrace: {name} …", file=sys.stderr, flush=True)
        folder = self._scratch / name.replace(", ", "-").replace(" ", "-")
        summary = train(self._config(synchronous, wait_s), folder=folder, progress=True)
        if not summary["finished"]:
            raise HeadraceError("the benchmark was stopped", name)
        seen = window(RunFolder(folder).read_metrics(), SKIPPED_STEPS)
        accounted = [sum(spent.values()) / seen.wall_s for spent in (seen.engine, seen.trainer)]
        return {
            "run": name,
            "trained_tokens_per_s": seen.tokens_per_s,
            "step_s": seen.wall_s / seen.steps,
            "generation_s_per_step": seen.engine["busy"] / seen.steps,
            "scorer_wait_s": wait_s,
            "engine_idle_frac": seen.engine["idle"] / seen.wall_s,
            "trainer_idle_frac": seen.trainer["idle"] / seen.wall_s,
            "engine_busy_frac": seen.engine["busy"] / seen.wall_s,
            "trainer_busy_frac": seen.trainer["busy"] / seen.wall_s,
            "staleness_mean": seen.staleness_mean,
            "time_accounted_frac": max(accounted, key=lambda frac: abs(frac - 1)),
        }

    def _config(self, synchronous: bool, wait_s: float) -> RunConfig:
        buffer = (
            BufferConfig(type="none")
            if synchronous
            else BufferConfig(type="bounded", max_staleness=self._max_staleness, order=self._order)
        )
        return RunConfig(
            model=ModelConfig(path=str(self._model)),
            tasks=PythonTasks(source="headrace.bench.workload:tasks", options=self._tasks),
            environment=EnvironmentConfig(source="headrace.bench.workload:GivenLengths", max_tokens=self._cap),
            scorer=ScorerConfig(
                source="headrace.bench.workload:waiting_score", options={"mean_s": wait_s}, concurrency=4096
            ),
            engine=NativeEngineConfig(max_context=self._cap + 32, max_running=self._groups * self._group_size * 3),
            buffer=buffer,
            training=TrainingConfig(
                steps=self._steps,
                groups_per_batch=self._groups,
                group_size=self._group_size,
                optimizer=OptimizerConfig(learning_rate=1e-6),
                checkpoint_every=self._steps,
            ),
            recording=RecordingConfig(episodes=0.0, tensorboard=False, keep_versions_every=10**6),
            seed=self._seed,
        )
