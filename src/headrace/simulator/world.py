"""Simulated components under the real pipeline: cost models with delays, failures and storage that can forget.

A `World` is what outlives a crash: the disk. Everything else is made anew for each life of the controller.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.engine.base import KvPolicy, SampleRequest, SwapReport
from headrace.errors import ComponentDied, EpisodeFailure, SyncError
from headrace.ledger import Change, Ledger
from headrace.records import Batch, Episode, KvEvent, Support, Turn, WeightVersion
from headrace.rollout.base import EpisodeRequest
from headrace.sync import check_manifest
from headrace.sync.base import Manifest, TensorSpec
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


TOKEN = 0
"""What simulated engines sample."""
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {"w": ("float32", (1,))}
"""A simulated model's parameters; their one number stands for the bytes."""


class SimEngine:
    """Emits tokens at a steady rate while it is not paused, each under the version served at that moment.

    Its own clock, on which tokens and swaps are dated, stands still during a pause.
    """

    def __init__(self, world: World, name: str):
        self.name = name
        self.version = -1
        self.load = 0
        self._world = world
        self._swaps: list[tuple[float, int, KvPolicy]] = [(0.0, -1, "keep")]
        self._announced: Manifest | None = None
        self._standby: int | None = None
        self._verified = False
        self._paused = False
        self._alarms: dict[int, asyncio.Event] = {}
        self._cut: set[int] = set()
        self._tokens = 0
        self._since = asyncio.get_running_loop().time()
        self._own_s = self._busy_s = self._idle_s = 0.0

    async def sample(self, request: SampleRequest) -> Turn:
        if len(request.context) == 0 or request.max_tokens < 1 or request.id in self._alarms:
            raise EpisodeFailure("bad_request", "no context, no tokens wanted, or an id that is running")
        costs, dice = self._world.costs, self._world.dice
        wanted = int(costs.median_tokens * np.exp(costs.sigma * dice.gauss(0, 1))) + 1
        stop: Any = "stop" if wanted < request.max_tokens or TOKEN in request.stop_tokens else "length"
        wanted = 1 if TOKEN in request.stop_tokens else min(wanted, request.max_tokens)
        begun = self._tick()
        self.load += 1
        try:
            if await self._cut_before(begun + wanted * costs.token_s, request.id):
                stop, wanted = "cancelled", min(wanted, int((self._tick() - begun) / costs.token_s + 1e-6))
        finally:
            self._tick()
            self.load -= 1
            self._alarms.pop(request.id, None)
            self._cut.discard(request.id)
        self._tokens += wanted
        return self._turn(request, begun, wanted, stop)

    async def _cut_before(self, end: float, request_id: int) -> bool:
        """Wait for `end` on the engine's own clock. True when the request was cut before it."""
        while (left := end - self._tick()) > 1e-9:
            if request_id in self._cut:
                return True
            self._alarms[request_id] = alarm = asyncio.Event()
            try:
                async with asyncio.timeout(None if self._paused else left):
                    await alarm.wait()
            except TimeoutError:
                pass
        return False

    def _turn(self, request: SampleRequest, begun: float, made: int, stop: Any) -> Turn:
        times = np.asarray([at for at, _, _ in self._swaps])
        at = begun + np.arange(made) * self._world.costs.token_s
        served = np.searchsorted(times, at, side="right") - 1
        lineage: list[KvEvent] = []
        for j in np.flatnonzero(np.diff(served, prepend=-1)).tolist():
            _, version, kv = self._swaps[served[j]]
            if j == 0:
                lineage.append(KvEvent(position=0, version=version, before="kept", cause="start"))
            else:
                before: Any = "recomputed" if kv == "recompute" else "kept"
                lineage.append(KvEvent(position=len(request.context) + j - 1, version=version, before=before))
        return Turn(
            tokens=np.full(made, TOKEN, np.int32),
            logprobs=np.zeros(made, np.float32),
            versions=np.asarray([version for _, version, _ in self._swaps], np.int32)[served],
            context=request.context,
            stop=stop,
            sampling=request.sampling,
            lineage=tuple(lineage),
            support=Support.from_rows([np.array([TOKEN])] * made) if request.sampling.truncates else None,
            policy=request.policy,
            engine=self.name,
            seed=request.seed,
        )

    def cut(self, request_id: int) -> None:
        if request_id in self._alarms:
            self._cut.add(request_id)
            self._alarms[request_id].set()

    async def announce(self, manifest: Manifest) -> None:
        await self._stage("announce")
        check_manifest(manifest, TENSORS, who=self.name)
        self._announced, self._standby, self._verified = manifest, None, False

    async def transfer(self, number: int) -> None:
        manifest = self._expected("transfer", number)
        await self._stage("transfer")
        self._standby, self._verified = manifest.location["w"], False

    async def verify(self, number: int) -> None:
        manifest = self._expected("verify", number)
        await self._stage("verify")
        if self._standby != manifest.tensors[0].checksum:
            raise SyncError("verify", self.name, "checksums differ for w")
        self._verified = True

    async def swap(self, number: int, kv: KvPolicy) -> SwapReport:
        self._expected("swap", number)
        if not self._verified:
            raise SyncError("swap", self.name, "not verified")
        self._announced, self._verified = None, False
        self._swaps.append((self._tick(), number, kv))
        await self._stage("swap")
        self.version = number
        return SwapReport(version=number, pause_s=0.0, running=self.load)

    async def pause(self) -> None:
        self._set_paused(True)

    async def resume(self) -> None:
        self._set_paused(False)

    async def usage(self) -> Usage:
        self._tick()
        return Usage(busy_s=self._busy_s, idle_s=self._idle_s, tokens=self._tokens, running=self.load)

    async def close(self) -> None: ...

    def _expected(self, stage: str, number: int) -> Manifest:
        if self._announced is None or self._announced.version.number != number:
            raise SyncError(stage, self.name, f"version {number} was not announced")
        return self._announced

    def _set_paused(self, paused: bool) -> None:
        self._tick()
        self._paused = paused
        for alarm in self._alarms.values():
            alarm.set()

    def _tick(self) -> float:
        """Account for the time since the last tick; returns the engine's own clock."""
        now = asyncio.get_running_loop().time()
        spent, self._since = now - self._since, now
        if not self._paused:
            self._own_s += spent
        if self.load and not self._paused:
            self._busy_s += spent
        else:
            self._idle_s += spent
        return self._own_s

    async def _stage(self, name: str) -> None:
        await self._world.spend(self._world.costs.stage_s)
        if self._world.happens(self._world.costs.sync_failure):
            raise ComponentDied(self.name, f"simulated, in {name}")


class SimTrainer:
    """Counts versions; its checkpoints appear whole, at the end of the time they take."""

    def __init__(self, world: World):
        self.weights = 1
        """Stands for the parameters: another number after every step."""
        self._world = world
        self._turn = asyncio.Lock()

    async def train(self, batch: Batch) -> StepReport:
        async with self._turn:
            await self._world.spend(self._world.costs.step_s)
            lag = max(batch.version - (e.version_min or 0) for e in batch.episodes)
            self.weights = self._world.dice.getrandbits(32)
            return StepReport(step=batch.step, version=batch.version + 1, metrics={"staleness_max": float(lag)})

    async def stage(self, version: WeightVersion) -> Manifest:
        async with self._turn:
            await self._world.spend(self._world.costs.stage_s)
            spec = TensorSpec(name="w", dtype="float32", shape=(1,), offset=0, nbytes=4, checksum=self.weights)
            return Manifest(
                version=version,
                payload="full",
                transport="simulated",
                tensors=(spec,),
                nbytes=4,
                location={"w": self.weights},
            )

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        async with self._turn:
            await self._world.spend(self._world.costs.save_s)
            self._world.checkpoints.append((state, self.weights))

    async def export(self, folder: str) -> None: ...

    async def keep(self, version: int, file: str) -> None: ...

    async def load(self, folder: str) -> dict[str, Any]:
        state, self.weights = self._world.checkpoints[-1]
        return state

    async def rename(self, version: int) -> None: ...

    async def usage(self) -> Usage:
        return Usage(busy_s=asyncio.get_running_loop().time())

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
        sample = SampleRequest(id=self._requests, context=np.zeros(4, np.int32), max_tokens=400)
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

    def step(self, line: dict[str, Any]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None:
        self._world.events.append({"kind": kind, **fields})

    def batch(self, batch: Batch, produced: int) -> None:
        self._world.batches.append((batch, produced))

    async def close(self) -> None: ...


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
