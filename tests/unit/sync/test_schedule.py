"""The order of a publication, and what it does to requests that run."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engine.base import Interrupt
from headrace.errors import ConfigError, DeadlineExceeded
from headrace.records import WeightVersion
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.world import SimTrainer
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Published, Publisher
from headrace.testing.fakes import fake_pair, staged
from headrace.testing.serving import request


async def publish(engine: SimEngine, trainer: SimTrainer, number: int, config: SyncConfig) -> Published:
    offer = await staged(trainer, WeightVersion(number=number, parent=number - 1, step=number))
    return await Publisher(config).publish(*offer, [engine])


@pytest.mark.parametrize("schedule", ["never_stop", "blocking"])
@pytest.mark.parametrize("interrupt", ["keep", "recompute", "resume", "retry"])
def test_running_requests_are_treated_as_configured(schedule, interrupt: Interrupt):
    async def main() -> None:
        engine, trainer = fake_pair()
        await publish(engine, trainer, 1, SyncConfig())
        task = asyncio.create_task(engine.sample(request([1, 2], 1000)))
        await asyncio.sleep(0.3)
        published = await publish(engine, trainer, 2, SyncConfig(schedule=schedule, interrupt=interrupt))
        assert published.number == 2
        assert (published.pause_s == published.seconds) == (schedule == "blocking")
        turn = await task
        events = [(event.version, event.before, event.cause) for event in turn.lineage]
        start = [(1, "kept", "start")]
        assert (turn.stop, events) == {
            "keep": ("length", [*start, (2, "kept", "swap")]),
            "recompute": ("length", [*start, (2, "recomputed", "swap")]),
            "resume": ("cancelled", start),
            "retry": ("length", [(2, "kept", "start")]),
        }[interrupt]

    run_virtual(main())


def test_a_publication_that_drains_lasts_as_long_as_what_runs():
    async def main() -> None:
        engine, trainer = fake_pair()
        await publish(engine, trainer, 1, SyncConfig())
        task = asyncio.create_task(engine.sample(request([1, 2], 1000)))
        await asyncio.sleep(0.3)
        published = await publish(engine, trainer, 2, SyncConfig(interrupt="drain"))
        assert set(task.result().versions.tolist()) == {1}
        assert 0.65 < published.seconds < 0.8
        assert published.pause_s == 0

    run_virtual(main())


def test_a_drain_past_the_deadline_fails_and_the_engine_serves_what_it_served():
    async def main() -> None:
        engine, trainer = fake_pair()
        await publish(engine, trainer, 1, SyncConfig())
        task = asyncio.create_task(engine.sample(request([1, 2], 1000)))
        await asyncio.sleep(0.3)
        published = await publish(engine, trainer, 2, SyncConfig(interrupt="drain", deadline_s=0.2))
        with pytest.raises(DeadlineExceeded, match=r"publication waited 0.2 s for fake to swap"):
            raise published.failed["fake"]
        assert (await engine.sample(request([3], 2))).versions.tolist() == [1, 1]
        assert not task.done()
        assert set((await task).versions.tolist()) == {1}
        assert engine.version == 1

    run_virtual(main())


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
def test_an_engine_that_was_told_to_pause_goes_on_although_its_answer_was_not_awaited(end):
    async def main() -> None:
        engine, trainer = fake_pair()
        await publish(engine, trainer, 1, SyncConfig())
        pause = engine.pause

        async def answer_late() -> None:
            await pause()
            await asyncio.sleep(0.5)

        engine.pause = answer_late  # type: ignore[method-assign]
        deadline_s = 0.2 if end == "deadline" else 10.0
        publishing = asyncio.create_task(
            publish(engine, trainer, 2, SyncConfig(schedule="blocking", deadline_s=deadline_s))
        )
        await asyncio.sleep(0.3)
        publishing.cancel()
        await asyncio.wait({publishing})
        assert publishing.cancelled() == (end == "cancelled")
        async with asyncio.timeout(5.0):
            assert (await engine.sample(request([3], 2))).versions.tolist() == [1, 1]

    run_virtual(main())


def test_a_paused_engine_cannot_be_drained():
    with pytest.raises(ConfigError, match=r"drain.*never_stop"):
        SyncConfig(schedule="blocking", interrupt="drain").check()
