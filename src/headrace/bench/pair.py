"""A trainer and an engine in processes of their own, as a run starts them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.engine.config import NativeEngineConfig
from headrace.engine.messages import EngineReady
from headrace.engine.remote import RemoteEngine
from headrace.orchestration.processes import compute_threads, ready, spawn
from headrace.sync import open_channel
from headrace.training.config import TrainingConfig
from headrace.training.remote import RemoteTrainer, TrainerReady

DEADLINE_S = 120.0
START_S = 600.0


class Pair(NamedTuple):
    trainer: RemoteTrainer
    engine: RemoteEngine


@asynccontextmanager
async def pair(
    model: Path, training: TrainingConfig, engine: NativeEngineConfig, *, seed: int = 0
) -> AsyncIterator[Pair]:
    """Of one model's folder. Weights can go from one to the other, on a GPU without leaving it."""
    channel = open_channel("cuda_ipc" if training.device == "cuda" else "shared_memory")
    threads = compute_threads()
    async with AsyncExitStack() as closing:
        logs = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        closing.callback(os.close, channel["descriptor"])
        common = {"model": str(model), "threads": threads, "channel": channel}
        places: dict[str, Any] = {"logs": logs, "fds": [channel["descriptor"]], "threads": threads}
        options = {
            "training": msgspec.to_builtins(training),
            "seed": seed,
            "max_staleness": None,
            "gives_back": False,
            "sender": {"payload": "full", "dtype": training.dtype},
        }
        peer = await spawn("trainer", "headrace.training.remote:start", {**common, **options}, **places)
        trainer = RemoteTrainer(peer, step_s=DEADLINE_S, stage_s=DEADLINE_S, close_s=10.0)
        closing.push_async_callback(trainer.close)
        options = {"name": "engine-0", "engine": msgspec.to_builtins(engine), "deadline_s": DEADLINE_S}
        peer = await spawn("engine-0", "headrace.engine.serve:start", {**common, **options}, **places)
        remote = RemoteEngine(peer, deadline_s=DEADLINE_S, close_s=10.0)
        closing.push_async_callback(remote.close)
        await asyncio.gather(ready(trainer.peer, TrainerReady, START_S), ready(remote.peer, EngineReady, START_S))
        yield Pair(trainer, remote)


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel what would go on for ever; if some of it has failed meanwhile, that is the error."""
    for task in tasks:
        task.cancel()
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        if found is not None and not isinstance(found, asyncio.CancelledError):
            raise found
