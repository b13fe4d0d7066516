"""What the tests of the engine's contract are written with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import msgspec
import numpy as np
import pytest

from headrace.engine.base import Engine, Interrupt, SampleRequest, ScoreRequest
from headrace.errors import SyncError
from headrace.records import KvEvent, Turn, WeightVersion
from headrace.sync.base import Manifest, Seal
from headrace.testing.loops import on_loop, until

Feature = Literal["score", "fork", "sleep", "keep", "recompute", "resume", "retry", "drain"]


@dataclass(frozen=True)
class Serving:
    """An engine under test and what goes with it. One may serve all tests of a suite: they leave it idle."""

    engine: Engine
    run: Callable[[Coroutine[Any, Any, None]], Any]
    """Runs a coroutine on the engine's own event loop: an asyncio.Runner's `run`."""
    stage: Callable[[WeightVersion], Awaitable[tuple[Manifest, Seal]]]
    """Put weights, other ones for each version, where the engine can fetch them."""
    vocab_size: int
    long_tokens: int
    """A max_tokens that the engine works on for about a second."""
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))


scenario = on_loop(lambda fixtures: fixtures["serving"].run)


class EngineTests:
    """Base of the suite's parts."""

    supports: ClassVar[frozenset[Feature]] = frozenset(get_args(Feature))
    """A backend that lacks something says so here; the tests that need it are skipped."""

    @pytest.fixture
    def serving(self) -> Serving:
        raise NotImplementedError("give a fixture `serving` that returns a Serving")

    def needs(self, *features: Feature) -> None:
        missing = set(features) - self.supports
        if missing:
            pytest.skip(f"this engine does not support {', '.join(sorted(missing))}")


# ── Steps of the tests ───────────────────────────────────────────────────────────────────────────────────

_ids = itertools.count(1)


def request(context: list[int], max_tokens: int, **fields: Any) -> SampleRequest:
    values = {"id": next(_ids), **fields}
    return SampleRequest(context=np.asarray(context, np.int32), max_tokens=max_tokens, **values)


def start(serving: Serving, context: list[int], **fields: Any) -> asyncio.Task[Turn]:
    """Sample for about a second."""
    return asyncio.create_task(serving.engine.sample(request(context, serving.long_tokens, **fields)))


async def score(serving: Serving, turn: Turn) -> Turn:
    """The turn's tokens, scored as they were sampled."""
    asked = ScoreRequest(
        id=next(_ids), context=turn.context, tokens=turn.tokens, temperature=turn.sampling.temperature
    )
    return await serving.engine.score(asked)


async def publish(serving: Serving, interrupt: Interrupt = "keep") -> int:
    """Take a new version through all stages; returns its number."""
    number = await verified(serving)
    await serving.engine.swap(number, interrupt)
    return number


async def verified(serving: Serving) -> int:
    """Take a new version through all stages but the swap; returns its number."""
    manifest, seal = await stage(serving)
    await take_in(serving.engine, manifest, seal, swap=False)
    return seal.number


async def take_in(engine: Engine, manifest: Manifest, seal: Seal, *, swap: bool = True) -> None:
    """All stages, or all but the swap."""
    await engine.announce(manifest)
    await engine.transfer(seal.number)
    await engine.verify(seal)
    if swap:
        await engine.swap(seal.number, "keep")


async def stage(serving: Serving) -> tuple[Manifest, Seal]:
    number = next(serving.numbers)
    return await serving.stage(WeightVersion(number=number, parent=serving.engine.version, step=number))


async def has(engine: Engine, *, running: int) -> bool:
    usage = await engine.usage()
    return (usage.running, usage.waiting) == (running, 0)


async def running(engine: Engine, count: int) -> None:
    """Wait until so many requests have begun, and time has passed since."""
    await until(lambda: has(engine, running=count))
    await asyncio.sleep(0.02)


async def serves(engine: Engine, number: int) -> None:
    assert engine.version == number
    assert set((await engine.sample(request([1, 2], 3))).versions.tolist()) == {number}


async def refused(stage: str, action: Awaitable[Any]) -> None:
    with pytest.raises(SyncError) as caught:
        await action
    assert caught.value.stage == stage


def changed(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)


def plain(lineage: tuple[KvEvent, ...]) -> list[tuple[int, int, str, str]]:
    return [(event.position, event.version, event.before, event.cause) for event in lineage]


async def fingerprint(engine: Engine) -> tuple[int, tuple[int, ...]]:
    return plain_seal(await engine.fingerprint())


def plain_seal(seal: Seal) -> tuple[int, tuple[int, ...]]:
    return seal.number, tuple(seal.checksums)
