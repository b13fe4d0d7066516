"""Simulated components under the real pipeline: cost models with delays, failures and storage that can forget.
The engine is in engine.py.

A `World` is what outlives a crash: the disk. Everything else is made anew for each life of the controller.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.engine.base import SampleRequest
from headrace.errors import EpisodeFailure, Superseded
from headrace.ledger import Change, Ledger
from headrace.records import Batch, Episode, WeightVersion
from headrace.rollout.base import EpisodeRequest, turn_seed
from headrace.sync.base import Destination, Manifest, Seal, Stream, TensorSpec
from headrace.training.base import StepReport
from headrace.usage import Usage


@dataclass(frozen=True)
class Costs:
    """Mean seconds of virtual time, and probabilities, of everything that happens."""

    token_s: float = 0.01
    median_tokens: int = 20
    sigma: float = 1.0
    score_s: float = 0.05
    step_s: float = 0.5
    stage_s: float = 0.02
    commit_s: float = 0.01
    save_s: float = 0.1
    environment_failure: float = 0.0
    scorer_failure: float = 0.0
    sync_failure: float = 0.0


@dataclass
class World:
    """The disk and the dice."""

    costs: Costs
    dice: random.Random
    ledger: Ledger = field(default_factory=lambda: Ledger(":memory:"))
    checkpoints: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    batches: list[tuple[Batch, int]] = field(default_factory=list)

    async def spend(self, mean_s: float) -> None:
        """Take a random time around a mean."""
        await asyncio.sleep(mean_s * self.dice.expovariate(1.0))

    def happens(self, probability: float) -> bool:
        return self.dice.random() < probability


class SimTrainer:
    """Counts versions; its checkpoints appear whole, at the end of the time they take."""

    def __init__(self, world: World):
        self.weights = 1
        """Stands for the parameters: another number after every step."""
        self._world = world
        self._turn = asyncio.Lock()
        self._at_rest = asyncio.Lock()
        self._version: int | None = None
        """None: whatever is staged."""
        self._staged: tuple[WeightVersion, int] | None = None
        self._began = asyncio.get_running_loop().time()
        self._busy_s = 0.0

    async def train(self, batch: Batch) -> StepReport:
        async with self._turn:
            begun = asyncio.get_running_loop().time()
            await self._world.spend(self._world.costs.step_s)
            self._busy_s += asyncio.get_running_loop().time() - begun
            lag = max(batch.version - (e.version_min or 0) for e in batch.episodes)
            async with self._at_rest:
                self.weights = self._world.dice.getrandbits(32)
                self._version = batch.version + 1
            return StepReport(step=batch.step, version=batch.version + 1, metrics={"staleness_max": float(lag)})

    async def stage(self, version: WeightVersion, to: Sequence[Destination]) -> Manifest:
        async with self._at_rest:
            if self._version is not None and version.number != self._version:
                raise Superseded("announce", "trainer", f"version {version.number} has become {self._version}")
            self._staged = (version, self.weights)
            await self._world.spend(self._world.costs.stage_s)
            return self._offer()

    async def seal(self, number: int) -> Seal:
        await self._world.spend(self._world.costs.stage_s)
        return self._sealed(number)

    async def restage(self, number: int, to: Sequence[Destination]) -> tuple[Manifest, Seal]:
        await self._world.spend(self._world.costs.stage_s)
        return self._offer(), self._sealed(number)

    def _offer(self) -> Manifest:
        assert self._staged is not None
        version, weights = self._staged
        spec = TensorSpec(name="w", dtype="float32", shape=(1,), offset=0, nbytes=4)
        stream = Stream(number=version.number, nbytes=4, location={"w": weights})
        return Manifest(
            version=version, payload="full", transport="simulated", tensors=(spec,), nbytes=4, streams=(stream,)
        )

    def _sealed(self, number: int) -> Seal:
        assert self._staged is not None
        assert self._staged[0].number == number
        return Seal(number=number, checksums=(self._staged[1],))

    async def save(self, folder: str, state: dict[str, Any]) -> str:
        async with self._turn:
            await self._world.spend(self._world.costs.save_s)
            self._world.checkpoints.append((state, self.weights))
        return f"{self.weights:x}"

    async def export(self, folder: str) -> None: ...

    async def keep(self, version: int, file: str) -> None: ...

    async def load(self, folder: str) -> dict[str, Any]:
        state, self.weights = self._world.checkpoints[-1]
        return state

    async def rename(self, version: int) -> None:
        self._version = version

    async def usage(self) -> Usage:
        wall_s = asyncio.get_running_loop().time() - self._began
        return Usage(busy_s=self._busy_s, idle_s=wall_s - self._busy_s)

    async def close(self) -> None: ...


class SimRollouts:
    """One turn an episode."""

    def __init__(self, world: World):
        self._world = world
        self._requests = 0
        self._open: dict[str, tuple[EpisodeRequest, int]] = {}
        self._cut: set[str] = set()

    async def run(self, request: EpisodeRequest) -> Episode:
        self._requests += 1
        seed = turn_seed(request.seed, 0)
        sample = SampleRequest(id=self._requests, context=np.zeros(4, np.int32), max_tokens=400, seed=seed)
        self._open[request.id] = (request, sample.id)
        try:
            if self._world.happens(self._world.costs.environment_failure):
                raise EpisodeFailure("environment_error", "simulated")
            turn = await request.engine.sample(sample)
            request.on_tokens(len(turn.tokens))
            failure = "late" if request.id in self._cut else None
            return Episode(id=request.id, task=request.task, turns=(turn,), failure=failure)
        except EpisodeFailure as error:
            return Episode(id=request.id, task=request.task, failure=error.reason)
        finally:
            del self._open[request.id]
            self._cut.discard(request.id)

    def cut(self, episode_id: str) -> None:
        if episode_id in self._open:
            self._cut.add(episode_id)
            request, sample_id = self._open[episode_id]
            request.engine.cut(sample_id)

    def hold_clocks(self, held: bool) -> None: ...


class SimScorers:
    def __init__(self, world: World):
        self._world = world

    async def score(self, episode: Episode) -> Episode:
        await self._world.spend(self._world.costs.score_s)
        if self._world.happens(self._world.costs.scorer_failure):
            return episode.with_(failure="scorer_error", detail="simulated")
        return episode.with_(reward=float(self._world.happens(0.5)))


class SimStore:
    """Durable after the commit's time; a crash in between keeps all of a commit or nothing."""

    def __init__(self, world: World):
        self._world = world

    async def apply(self, changes: Sequence[Change]) -> None:
        early = self._world.happens(0.5)
        if early:
            self._world.ledger.apply(changes)
        await self._world.spend(self._world.costs.commit_s)
        if not early:
            self._world.ledger.apply(changes)


class SimTelemetry:
    def __init__(self, world: World):
        self._world = world
        self._recorded: Counter[str] = Counter()

    def step(self, line: dict[str, Any]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None:
        self._world.events.append({"kind": kind, "time": time.time(), **fields})

    def batch(self, batch: Batch, produced: int, teacher: int | None = None) -> None:
        self._world.batches.append((batch, produced))
        self._recorded.update(groups_trained=len(batch.groups), episodes_trained=len(batch.advantages))

    async def close(self) -> None:
        self.event("recorded", **self._recorded)


class SimVault:
    def checkpoint(self, step: int) -> str:
        return f"step-{step}"

    def candidate(self, version: int) -> str:
        return f"candidate-{version}"

    def version(self, number: int) -> str:
        return f"version-{number}"

    def final(self) -> str:
        return "final"

    def kept_bytes(self) -> int:
        return 0

    async def choose(self, candidate: str, best: bool) -> None: ...

    async def prune(self) -> None: ...
