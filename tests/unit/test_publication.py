"""What becomes of a version when something fails, over fakes in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from headrace.errors import ComponentDied, SyncError
from headrace.publication import Publication, PublicationParts
from headrace.records import WeightVersion
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.world import SimTrainer
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher
from headrace.testing.fakes import fake_pair


def version(number: int) -> WeightVersion:
    return WeightVersion(number=number, parent=number - 1 if number else None, step=number)


class Setting:
    """Two engines, a trainer, and what was told."""

    def __init__(self, *, replaces: bool = True, **config: Any):
        pairs = [fake_pair(name=f"engine-{i}") for i in range(2)]
        self.engines: list[SimEngine] = [engine for engine, _ in pairs]
        self.members = self.engines
        self.trainer: SimTrainer = pairs[0][1]
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.replaced: list[str] = []
        settings = SyncConfig(**{"deadline_s": 1.0, **config})
        parts = PublicationParts(
            trainer=self.trainer,
            publisher=Publisher(settings),
            engines=self,
            journal=self,  # type: ignore[arg-type]
            telemetry=self,  # type: ignore[arg-type]
            served=lambda: None,
            replace=self.replace if replaces else None,
        )
        self.publication = Publication(settings, parts)

    async def flush(self) -> None: ...

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    async def replace(self, engine: SimEngine) -> None:
        self.replaced.append(engine.name)
        engine.version = -1
        for name in ("announce", "transfer", "verify", "swap"):
            engine.__dict__.pop(name, None)

    async def publish(self, number: int) -> None:
        self.trainer.weights = 100 + number
        await (await self.publication.begin(version(number), self.engines))

    def failures(self) -> list[tuple[int, str]]:
        return [(fields["version"], fields["who"]) for kind, fields in self.events if kind == "sync_failed"]


def failing(times: int, error: Exception, then: Any) -> Any:
    left = times

    async def act(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error
        return await then(*arguments)

    return act


def test_an_engine_that_fails_once_is_offered_the_version_again_and_others_do_not_wait_for_it():
    async def main() -> None:
        here = Setting()
        await here.publish(0)
        slow = here.engines[1]
        slow.transfer = failing(1, SyncError("transfer", "engine-1", "broken"), slow.transfer)  # type: ignore[method-assign]
        await here.publish(1)
        assert [engine.version for engine in here.engines] == [1, 1]
        assert here.failures() == [(1, "engine-1")]
        assert here.replaced == []

    run_virtual(main())


def test_an_engine_that_is_dead_or_fails_again_is_replaced():
    async def main() -> None:
        here = Setting()
        await here.publish(0)
        dead, stuck = here.engines
        dead.verify = failing(9, ComponentDied("engine-0", "killed"), None)  # type: ignore[method-assign]
        stuck.swap = failing(9, SyncError("swap", "engine-1", "stuck"), None)  # type: ignore[method-assign]
        await here.publish(1)
        assert here.replaced == ["engine-0", "engine-1"]
        assert here.failures() == [(1, "engine-0"), (1, "engine-1"), (1, "engine-1")]
        assert [engine.version for engine in here.engines] == [1, 1]

    run_virtual(main())


def test_without_a_way_to_replace_it_a_dead_engine_ends_the_run_with_its_reason():
    async def main() -> None:
        here = Setting(replaces=False)
        await here.publish(0)
        here.engines[0].announce = failing(9, ComponentDied("engine-0", "killed"), None)  # type: ignore[method-assign]
        with pytest.raises(ComponentDied, match="engine-0"):
            await here.publish(1)
        assert here.engines[1].version == 1

    run_virtual(main())


def test_a_trainer_that_cannot_offer_a_version_tries_again_and_engines_go_on_with_the_old_one():
    async def main() -> None:
        here = Setting()
        await here.publish(0)
        full = SyncError("announce", "files", "No space left on device")
        here.trainer.stage = failing(2, full, here.trainer.stage)  # type: ignore[method-assign]
        task = asyncio.create_task(here.publish(1))
        await asyncio.sleep(1.5)
        assert [engine.version for engine in here.engines] == [0, 0]
        await task
        assert [engine.version for engine in here.engines] == [1, 1]
        assert here.failures() == [(1, "trainer"), (1, "trainer")]

    run_virtual(main())


def test_a_trainer_that_can_never_offer_one_ends_the_run_with_its_reason():
    async def main() -> None:
        here = Setting(retries=2)
        here.trainer.stage = failing(9, SyncError("announce", "files", "No space left"), None)  # type: ignore[method-assign]
        with pytest.raises(SyncError, match="No space left"):
            await here.publish(0)
        assert len(here.failures()) == 2

    run_virtual(main())


def test_the_newest_version_wins_and_one_that_was_not_begun_is_skipped():
    async def main() -> None:
        here = Setting()
        await here.publish(0)
        loop = asyncio.create_task(here.publication.run())
        transfer = here.engines[0].transfer

        async def slowly(number: int) -> None:
            await asyncio.sleep(0.5)
            await transfer(number)

        here.engines[0].transfer = slowly  # type: ignore[method-assign]
        for number in range(1, 11):
            here.publication.produced(version(number), due=True)
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)
        loop.cancel()
        published = [fields["version"] for kind, fields in here.events if kind == "published"]
        assert published[:2] == [0, 1]
        assert published[-1] == 10
        assert len(published) < 8
        assert published == sorted(set(published))

    run_virtual(main())


def test_a_version_that_the_trainer_has_left_behind_gives_way_to_the_next():
    async def main() -> None:
        here = Setting()
        await here.publish(0)
        await here.trainer.rename(2)
        loop = asyncio.create_task(here.publication.run())
        here.publication.produced(version(1), due=True)
        await asyncio.sleep(0.5)
        assert [engine.version for engine in here.engines] == [0, 0]
        here.publication.produced(version(2), due=False)
        await asyncio.sleep(0.5)
        assert [engine.version for engine in here.engines] == [2, 2]
        loop.cancel()

    run_virtual(main())


def test_publications_keep_the_least_interval():
    async def main() -> None:
        here = Setting(min_interval_s=3.0)
        await here.publish(0)
        loop = asyncio.create_task(here.publication.run())
        times: list[float] = []
        begin = here.trainer.stage

        async def noted(*arguments: Any) -> Any:
            times.append(asyncio.get_running_loop().time())
            return await begin(*arguments)

        here.trainer.stage = noted  # type: ignore[method-assign]
        for number in range(1, 40):
            here.publication.produced(version(number), due=True)
            await asyncio.sleep(0.25)
        loop.cancel()
        assert len(times) == 4
        assert all(later - earlier > 2.999 for earlier, later in itertools.pairwise(times))

    run_virtual(main())


def test_an_engine_that_died_while_it_generated_gets_what_was_staged_last():
    async def main() -> None:
        here = Setting()
        await here.publish(0)
        await here.publish(1)
        here.engines[1].version = -1
        await here.publication.revive(here.engines[1])
        assert here.replaced == ["engine-1"]
        assert [engine.version for engine in here.engines] == [1, 1]
        await here.publication.revive(here.engines[1])
        assert here.replaced == ["engine-1"], "one that serves is left alone"

    run_virtual(main())
