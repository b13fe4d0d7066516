"""What publication does when something fails: who is asked again, who is replaced, and after how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from headrace.engine.base import SwapReport
from headrace.errors import ComponentDied, DeadlineExceeded, Superseded, SyncError
from headrace.publication import Publication, PublicationParts
from headrace.records import WeightVersion
from headrace.simulator.loop import run_virtual
from headrace.sync.base import Destination, Manifest, Seal, Stream, TensorSpec
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher

DEADLINE_S = 10.0


class Scripted:
    """Calls go as its script says: an error is raised, a number is a wait in seconds. Then they succeed."""

    def __init__(self) -> None:
        self.script: dict[str, list[Any]] = {}
        self.calls: list[str] = []

    async def act(self, what: str) -> None:
        self.calls.append(what)
        turns = self.script.get(what, [])
        turn = turns.pop(0) if turns else 0.0
        if isinstance(turn, BaseException):
            raise turn
        await asyncio.sleep(turn)


class FakeEngine(Scripted):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.version = -1

    async def announce(self, manifest: Manifest) -> None:
        await self.act("announce")

    async def transfer(self, number: int) -> None:
        await self.act("transfer")

    async def verify(self, seal: Seal) -> None:
        await self.act("verify")

    async def swap(self, number: int, interrupt: str) -> SwapReport:
        await self.act("swap")
        self.version = number
        return SwapReport(version=number, pause_s=0.0, running=0)

    async def pause(self) -> None:
        await self.act("pause")

    async def resume(self) -> None:
        await self.act("resume")


class FakeTrainer(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.version = 1
        self.offered: list[list[str]] = []

    async def stage(self, version: WeightVersion, to: Sequence[Destination]) -> Manifest:
        await self.act("stage")
        self.offered.append([one.name for one in to])
        if version.number != self.version:
            raise Superseded("announce", "trainer", f"version {version.number} has become {self.version}")
        return self._manifest(version)

    async def seal(self, number: int) -> Seal:
        await self.act("seal")
        return Seal(number=number, checksums=(0,))

    async def restage(self, number: int, to: Sequence[Destination]) -> tuple[Manifest, Seal]:
        await self.act("restage")
        return self._manifest(version(number)), Seal(number=number, checksums=(0,))

    @staticmethod
    def _manifest(version: WeightVersion) -> Manifest:
        return Manifest(
            version=version,
            payload="full",
            transport="fake",
            tensors=(TensorSpec(name="w", dtype="float32", shape=(1,), offset=0, nbytes=4),),
            nbytes=4,
            streams=(Stream(number=version.number, nbytes=4),),
        )


class Journal:
    async def flush(self) -> None: ...


class World:
    """A trainer, two engines, and the publication between them."""

    def __init__(self, **config: Any):
        self.trainer = FakeTrainer()
        self.engines = [FakeEngine("engine-0"), FakeEngine("engine-1")]
        self.members = self.engines
        self.replaced: list[str] = []
        self.events: list[tuple[str, str]] = []
        settings = SyncConfig(deadline_s=DEADLINE_S, **config)
        parts: Any = PublicationParts(
            trainer=self.trainer,  # type: ignore[arg-type]
            publisher=Publisher(settings),
            engines=self,
            journal=Journal(),  # type: ignore[arg-type]
            telemetry=self,  # type: ignore[arg-type]
            served=lambda: None,
            replace=self.replace,  # type: ignore[arg-type]
        )
        self.publication = Publication(settings, parts)

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, str(fields.get("who", ""))))

    async def replace(self, engine: FakeEngine) -> None:
        self.replaced.append(engine.name)
        engine.version = -1
        engine.script.clear()

    async def publish(self, number: int) -> float:
        """Seconds until all have it."""
        begun = asyncio.get_running_loop().time()
        self.trainer.version = number
        await (await self.publication.begin(version(number), self.engines))  # type: ignore[arg-type]
        assert [engine.version for engine in self.engines] == [number, number]
        return asyncio.get_running_loop().time() - begun


def version(number: int) -> WeightVersion:
    return WeightVersion(number=number, parent=number - 1, step=number)


def no_room() -> SyncError:
    return SyncError("announce", "trainer", "no room")


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main())


def test_a_trainer_without_room_is_asked_again_after_a_while():
    async def main() -> None:
        world = World(retries=3)
        world.trainer.script = {"stage": [no_room(), no_room(), no_room()]}
        assert await world.publish(1) == pytest.approx(1.0 + 2.0 + 4.0)
        assert world.events == [("sync_failed", "trainer")] * 3 + [("published", "")]
        assert world.replaced == []

    virtually(main)


def test_a_trainer_that_never_has_room_ends_the_run_with_the_reason():
    async def main() -> None:
        world = World(retries=2)
        world.trainer.script = {"stage": [no_room()] * 9}
        with pytest.raises(SyncError, match="no room"):
            await world.publish(1)
        assert world.trainer.calls == ["stage"] * 3

    virtually(main)


def test_a_version_whose_copy_is_lost_is_staged_from_the_weights_again():
    async def main() -> None:
        world = World()
        world.engines[1].script = {"verify": [SyncError("verify", "engine-1", "checksums differ")]}
        world.trainer.script = {"restage": [SyncError("announce", "trainer", "damaged")]}
        await world.publish(1)
        assert world.trainer.calls == ["stage", "seal", "restage", "stage", "seal"]
        assert world.trainer.offered == [["engine-0", "engine-1"], ["engine-1"]]
        assert world.engines[0].calls.count("swap") == 1
        assert world.replaced == []

    virtually(main)


def test_when_there_is_no_room_for_another_copy_either_only_who_lacks_the_version_waits_for_it():
    async def main() -> None:
        world = World()
        world.engines[1].script = {"verify": [SyncError("verify", "engine-1", "checksums differ")]}
        world.trainer.script = {"restage": [no_room()], "stage": [0.0, no_room(), no_room()]}
        assert await world.publish(1) == pytest.approx(1.0 + 2.0)
        assert world.trainer.offered == [["engine-0", "engine-1"], ["engine-1"]]
        assert world.engines[0].calls.count("swap") == 1
        assert world.replaced == []

    virtually(main)


def test_a_version_whose_copy_is_lost_gives_way_when_the_trainer_has_gone_on():
    async def main() -> None:
        world = World()
        world.engines[1].script = {"verify": [SyncError("verify", "engine-1", "checksums differ")]}
        world.trainer.script = {"restage": [SyncError("announce", "trainer", "damaged")], "seal": [1.0]}
        running = asyncio.create_task(world.publication.run())
        world.publication.produced(version(1), due=True)
        await asyncio.sleep(0.5)
        world.trainer.version = 2
        await asyncio.sleep(2.0)
        assert [engine.version for engine in world.engines] == [1, -1]
        world.publication.produced(version(2), due=False)
        await asyncio.sleep(0.1)
        assert [engine.version for engine in world.engines] == [2, 2]
        running.cancel()

    virtually(main)


@pytest.mark.parametrize("told_before", [True, False])
def test_an_engine_that_cannot_be_revived_with_the_staged_version_gets_the_next(told_before: bool):
    async def main() -> None:
        world = World()
        await world.publish(1)
        running = asyncio.create_task(world.publication.run())
        world.engines[0].version = -1
        world.trainer.script = {"restage": [SyncError("announce", "trainer", "damaged")]}
        world.trainer.version = 2
        if told_before:
            world.publication.produced(version(2), due=False)
        await world.publication.revive(world.engines[0])  # type: ignore[arg-type]
        if not told_before:
            await asyncio.sleep(0.1)
            assert world.engines[0].version == -1
            world.publication.produced(version(2), due=False)
        await asyncio.sleep(0.1)
        assert [engine.version for engine in world.engines] == [2, 2]
        assert world.replaced == ["engine-0"]
        running.cancel()

    virtually(main)


@pytest.mark.parametrize("schedule", ["never_stop", "blocking"])
def test_no_engine_is_replaced_for_the_death_of_the_trainer(schedule):
    async def main() -> None:
        world = World(schedule=schedule)
        world.trainer.script = {"seal": [ComponentDied("trainer", "killed by signal 9")]}
        with pytest.raises(ComponentDied, match="trainer"):
            await world.publish(1)
        await asyncio.sleep(0.0)
        assert world.replaced == []
        assert [engine.calls.count("resume") for engine in world.engines] == [schedule == "blocking"] * 2

    virtually(main)


@pytest.mark.parametrize("schedule", ["never_stop", "blocking"])
@pytest.mark.parametrize("stage", ["announce", "transfer", "verify", "swap"])
def test_an_engine_that_gives_no_answer_costs_one_deadline_and_its_process(stage: str, schedule):
    async def main() -> None:
        world = World(schedule=schedule)
        world.engines[1].script = {stage: [1e6], "resume": [1e6]}
        assert await world.publish(1) == pytest.approx(DEADLINE_S)
        assert world.replaced == ["engine-1"]

    virtually(main)


def test_an_engine_that_says_that_it_waited_too_long_is_offered_the_version_again():
    async def main() -> None:
        world = World()
        late = DeadlineExceeded("engine-1", "version 1", 9.0, "the sender's log")
        world.engines[1].script = {"transfer": [late]}
        await world.publish(1)
        assert world.replaced == []
        world.engines[1].script = {"transfer": [late, late]}
        await world.publish(2)
        assert world.replaced == ["engine-1"]

    virtually(main)


def test_engines_are_not_replaced_while_it_is_the_trainer_that_takes_long():
    async def main() -> None:
        world = World()
        world.trainer.script = {"seal": [1.5 * DEADLINE_S]}
        world.engines[0].script = {"transfer": [1e6]}
        assert await world.publish(1) == pytest.approx(DEADLINE_S)
        assert world.replaced == []

    virtually(main)


def test_an_engine_that_drains_past_the_deadline_is_asked_once_more_before_it_is_replaced():
    async def main() -> None:
        world = World(interrupt="drain")
        world.engines[1].script = {"swap": [1e6]}
        assert await world.publish(1) == pytest.approx(DEADLINE_S)
        assert world.replaced == []

    virtually(main)
