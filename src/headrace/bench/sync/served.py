"""A native engine over random weights in a process of its own, kept busy, and what it says of its pauses."""

from __future__ import annotations

import asyncio
import itertools
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.engine.base import SampleRequest
from headrace.engine.messages import EngineReady
from headrace.engine.remote import RemoteEngine
from headrace.orchestration.processes import ready, spawn
from headrace.records import Record, WeightVersion, message
from headrace.sync.base import Destination
from headrace.sync.schedule import Published

DEADLINE_S = 60.0
DECODED = 48
_ids = itertools.count(1)


@message
class AskGaps(Record):
    """How long the device, or without one the process, stood still before each pass since this was asked last."""

    call: int


@message
class TellGaps(Record):
    call: int
    gaps_s: list[float]
    steps: int


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """The engine process's entry."""
    import torch

    from headrace.bench.engine import drive
    from headrace.engine.serve import EngineServer
    from headrace.sync import open_receiver

    torch.set_num_threads(options["threads"])
    engine = drive.make_engine(options["shape"], drive.device_of(options["device"]), **options["engine"])
    receiver = open_receiver(options["channel"], name=options["name"], deadline_s=DEADLINE_S)

    class Server(EngineServer):
        _steps_told = 0

        def _handle(self, record: Any) -> bool:
            if isinstance(record, AskGaps):
                gaps = [float(gap) for gap in engine.device_gaps]
                engine.device_gaps.clear()
                steps, self._steps_told = engine.steps - self._steps_told, engine.steps
                self._channel.send(TellGaps(call=record.call, gaps_s=gaps, steps=steps))
                return True
            return super()._handle(record)

    Server(sock, engine, receiver).serve()


def all_have(published: Published) -> Published:
    """The same, unless somebody has not got it: then why."""
    for error in published.failed.values():
        raise error
    return published


def stages_ms(versions: Iterable[Published]) -> dict[str, float]:
    """The median time of each stage."""
    spent: dict[str, list[float]] = {}
    for version in versions:
        for stage, seconds in version.stages.items():
            spent.setdefault(f"{stage}_ms", []).append(1e3 * seconds)
    return {stage: statistics.median(times) for stage, times in spent.items()}


class Served:
    """The engine, seen from here."""

    def __init__(self, engine: RemoteEngine):
        self.engine = engine
        self._numbers = itertools.count(1)

    def next_version(self) -> tuple[WeightVersion, list[Destination]]:
        """A version after the last one, and for whom it is."""
        number = next(self._numbers)
        version = WeightVersion(number=number, parent=number - 1, step=number)
        return version, [Destination(name=self.engine.name, version=self.engine.version)]

    async def gaps_ms(self) -> list[float]:
        reply = await self.engine.peer.call(AskGaps(call=self.engine.peer.next_call()), deadline_s=DEADLINE_S)
        return [1e3 * gap for gap in reply.gaps_s]

    async def step_ms(self, seconds: float = 0.5) -> float:
        """Mean over some seconds of generation."""
        peer = self.engine.peer
        await peer.call(AskGaps(call=peer.next_call()), deadline_s=DEADLINE_S)
        begun = time.perf_counter()
        await asyncio.sleep(seconds)
        reply = await peer.call(AskGaps(call=peer.next_call()), deadline_s=DEADLINE_S)
        return 1e3 * (time.perf_counter() - begun) / max(1, reply.steps)

    @asynccontextmanager
    async def busy(
        self, sequences: int, prompt: int, tokens: int, vocabulary: int, adapter: str | None = None
    ) -> AsyncIterator[None]:
        """So many sequences decode meanwhile."""
        rng = np.random.default_rng(0)
        requests = [
            SampleRequest(
                id=(number := next(_ids)),
                context=rng.integers(0, vocabulary, prompt).astype(np.int32),
                max_tokens=tokens,
                seed=number,
                adapter=adapter,
            )
            for _ in range(sequences)
        ]
        tasks = [asyncio.create_task(self.engine.sample(request)) for request in requests]
        # Until all prompts are through and every sequence has decoded for a while.
        begun = (await self.engine.usage()).tokens
        while (await self.engine.usage()).tokens < begun + DECODED * sequences:
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def served(
    shape: str, device: str, channel: dict[str, Any], *, threads: int = 1, name: str = "engine-0", **engine: Any
) -> AsyncIterator[Served]:
    """`engine` is what `bench.engine.drive.make_engine` takes."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        options = {"name": name, "shape": shape, "device": device, "channel": channel, "threads": threads}
        fds = [channel[key] for key in ("descriptor", "relay") if key in channel]
        peer = await spawn(
            name,
            "headrace.bench.sync.served:start",
            {**options, "engine": engine},
            logs=Path(scratch),
            fds=fds,
            threads=threads,
        )
        remote = RemoteEngine(peer, deadline_s=DEADLINE_S, close_s=10.0)
        try:
            await ready(peer, EngineReady, 600.0)
            yield Served(remote)
        except BaseException:
            print((Path(scratch) / f"{name}.log").read_text()[-4000:], flush=True)
            raise
        finally:
            await remote.close()
