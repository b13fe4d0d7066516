"""A whole run in virtual time, through as many crashes as are asked for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.buffer.memory import MemoryBuffer
from headrace.config.dump import dump_config
from headrace.config.run import RunConfig
from headrace.engine.pool import EnginePool
from headrace.errors import ComponentDied
from headrace.ledger import Journal
from headrace.pipeline import Parts, Pipeline
from headrace.records import Task
from headrace.resume import open_session
from headrace.rollout.tasks import TaskOrder
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.world import (
    Costs,
    SimRollouts,
    SimScorers,
    SimStore,
    SimTelemetry,
    SimTrainer,
    SimVault,
    World,
)
from headrace.sync.schedule import Publisher

Tamper = Callable[[Parts], None]
"""Breaks something, to see that it is noticed."""


@dataclass(frozen=True)
class Outcome:
    """What a simulated run left behind."""

    world: World
    lives: int
    finished: bool
    seconds: float
    """Virtual, of the last life."""


def simulate(
    config: RunConfig,
    costs: Costs,
    *,
    seed: int,
    engines: int = 1,
    crashes: Sequence[float] = (),
    tasks: int = 50,
    tamper: Tamper | None = None,
) -> Outcome:
    """Run to the end; the k-th life of the controller ends after `crashes[k]` virtual seconds, the last goes on.

    A component's simulated death also ends a life. What was not durable by then is lost.
    """
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, count=engines))
    world = World(costs=costs, dice=random.Random(seed))
    names = tuple(Task(id=str(i), prompt="") for i in range(tasks))
    seconds = 0.0
    for life in range(len(crashes) + 50):
        limit = crashes[life] if life < len(crashes) else None
        finished, seconds = run_virtual(_life(config, world, names, engines, limit, tamper))
        if finished:
            return Outcome(world, life + 1, True, seconds)
    return Outcome(world, len(crashes) + 50, False, seconds)


async def _life(
    config: RunConfig,
    world: World,
    tasks: Sequence[Task],
    engine_count: int,
    limit: float | None,
    tamper: Tamper | None,
) -> tuple[bool, float]:
    trainer = SimTrainer(world)
    state = await trainer.load("latest") if world.checkpoints else None
    start = open_session(world.ledger, state, config=dump_config(config))
    world.batches = [(batch, made) for batch, made in world.batches if batch.step <= start.progress.step]
    parts = Parts(
        engines=EnginePool([SimEngine(world, f"engine-{i}") for i in range(engine_count)]),
        rollouts=SimRollouts(world),
        scorers=SimScorers(world),
        buffer=MemoryBuffer(
            config.buffer,
            batch_groups=config.training.groups_per_batch,
            version=start.progress.version,
            steps=config.training.steps - start.progress.step,
            first_sequence=start.first_sequence,
            generating=config.generating_episodes,
            group_size=config.training.group_size,
        ),
        trainer=trainer,
        publisher=Publisher(config.sync),
        journal=Journal(SimStore(world), session=start.session),
        telemetry=SimTelemetry(world),
        vault=SimVault(),
        cpu_s=lambda: 0.0,
        tasks=TaskOrder(tasks, config.seed, start.task_position, start.returned_tasks),
    )
    progress = start.progress
    parts.telemetry.event("started", session=start.session, step=progress.step, version=progress.version)
    if tamper is not None:
        tamper(parts)
    pipeline = Pipeline(config, parts, start.progress)
    run = asyncio.ensure_future(pipeline.run())
    await asyncio.wait({run}, timeout=limit)
    now = asyncio.get_running_loop().time()
    if not run.done():
        return False, now
    error = run.exception()
    if isinstance(error, ComponentDied):
        return False, now
    if error is not None:
        raise error
    await parts.telemetry.close()
    return True, now
