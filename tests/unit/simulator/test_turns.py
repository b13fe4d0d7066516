"""Engines and trainer take turns: who sleeps when, with or without weights, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from outcome_builders import violations

from headrace.buffer.config import BufferConfig
from headrace.config.evaluation import EvaluationConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError, SyncError
from headrace.pipeline import Parts
from headrace.publication import Publication, PublicationParts
from headrace.records import Task, WeightVersion
from headrace.rollout.config import JsonlTasks, PythonTasks
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.run import Outcome, simulate
from headrace.simulator.world import Costs, SimTrainer, World
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher
from headrace.training.config import LoraConfig, TrainingConfig
from headrace.turns import Turns, TurnsParts

DEADLINE_S = 10.0
STEPS = 4


def config_of(buffer: str = "bounded", lora: bool = False, **sync: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=""),
        tasks=PythonTasks(source="a:b"),
        placement="turns",
        buffer=BufferConfig(type=buffer),
        training=TrainingConfig(
            steps=STEPS, groups_per_batch=2, group_size=2, lora=LoraConfig(rank=2) if lora else None
        ),
        sync=SyncConfig(deadline_s=DEADLINE_S, **sync),
    )


# ── Whole runs in virtual time ───────────────────────────────────────────────────────────────────────────


class Diary:
    """What engines and trainer did, in order, as `tamper` of a simulated run."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.asleep_in_training: list[list[bool]] = []

    def __call__(self, parts: Parts) -> None:
        for engine in parts.engines.members:
            self.note(engine)
        train = parts.trainer.train

        async def noted(batch: Any) -> Any:
            self.asleep_in_training.append([engine._asleep for engine in parts.engines.members])
            self.lines.append("train")
            return await train(batch)

        parts.trainer.train = noted

    def note(self, engine: SimEngine) -> None:
        sleep, swap, wake = engine.sleep, engine.swap, engine.wake

        async def noted_sleep(keep_weights: bool) -> None:
            await sleep(keep_weights)
            self.lines.append(f"{engine.name} sleeps {'with' if keep_weights else 'without'} weights")

        async def noted_swap(number: int, interrupt: Any) -> Any:
            report = await swap(number, interrupt)
            self.lines.append(f"{engine.name} has {number}")
            return report

        async def noted_wake() -> None:
            await wake()
            self.lines.append(f"{engine.name} wakes")

        engine.sleep, engine.swap, engine.wake = noted_sleep, noted_swap, noted_wake  # type: ignore[method-assign]


def slept(outcome: Outcome) -> list[dict[str, Any]]:
    return [event for event in outcome.world.events if event["kind"] == "slept"]


@pytest.mark.parametrize("buffer", ["none", "bounded"])
def test_engines_sleep_during_each_step_and_wake_with_the_version_it_made(buffer: str):
    config, diary = config_of(buffer), Diary()
    outcome = simulate(config, Costs(), seed=1, tamper=diary)
    turn = ["engine-0 sleeps without weights", "train", "engine-0 has {}", "engine-0 wakes"]
    turns = [line.format(number) for number in range(1, STEPS) for line in turn]
    assert diary.lines == ["engine-0 has 0", *turns, *turn[:2]], "after the last step nothing is sampled"
    assert outcome.finished
    assert violations(outcome) == []
    assert [event["step"] for event in slept(outcome)] == [1, 2, 3, 4]
    assert [event["woken"] for event in slept(outcome)] == [["engine-0"]] * 3 + [[]]
    assert all(event["asleep_s"] > 0 for event in slept(outcome))


def test_requests_wait_while_their_engine_sleeps_and_their_lineage_says_so():
    config, diary = config_of(), Diary()
    outcome = simulate(config, Costs(sigma=2.0), seed=1, engines=3, tamper=diary)
    assert diary.asleep_in_training == [[True, True, True]] * STEPS
    turns = [turn for batch, _ in outcome.world.batches for episode in batch.episodes for turn in episode.turns]
    through = [turn for turn in turns if any(event.cause == "sleep" for event in turn.lineage)]
    assert through
    assert all(event.before == "recomputed" for turn in through for event in turn.lineage[1:])
    assert violations(outcome) == []


def test_weights_are_kept_over_a_step_whose_version_is_not_published():
    config, diary = config_of(interval=2), Diary()
    outcome = simulate(config, Costs(), seed=1, tamper=diary)
    asleep = [line for line in diary.lines if "sleeps" in line]
    kept, lost = "engine-0 sleeps with weights", "engine-0 sleeps without weights"
    assert asleep == [kept, lost, kept, lost]
    assert [line for line in diary.lines if "has" in line] == ["engine-0 has 0", "engine-0 has 2"]
    assert diary.lines.count("engine-0 wakes") == STEPS - 1
    assert violations(outcome) == []


@pytest.mark.parametrize("change", [{"payload": "delta"}, {"lora": True}])
def test_weights_are_kept_where_a_version_does_not_bring_all_of_them(change: dict[str, Any]):
    diary = Diary()
    simulate(config_of(**change), Costs(), seed=1, tamper=diary)
    asleep = [line for line in diary.lines if "sleeps" in line]
    assert asleep == ["engine-0 sleeps with weights"] * STEPS


def once(error: Exception, then: Any) -> Any:
    """Fails at its first call."""
    left = [error]

    async def act(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return await then(*arguments)

    return act


def test_engines_sleep_on_until_a_version_that_the_trainer_could_not_offer_has_come():
    """Its copy is damaged on the way, is not to be had again, and there is no room for another at first."""
    config, diary = config_of(), Diary()
    no_room = SyncError("announce", "trainer", "no room")

    def tamper(parts: Parts) -> None:
        diary(parts)
        (engine,) = parts.engines.members
        stage, verify = parts.trainer.stage, engine.verify

        async def staged(version: WeightVersion, to: Any) -> Any:
            if version.number == 1:
                engine.verify = once(SyncError("verify", "engine-0", "checksums differ"), verify)
                parts.trainer.stage = once(no_room, stage)
            return await stage(version, to)

        parts.trainer.stage = staged
        parts.trainer.restage = once(no_room, None)

    outcome = simulate(config, Costs(), seed=1, tamper=tamper)
    turn = ["engine-0 sleeps without weights", "train", "engine-0 has {}", "engine-0 wakes"]
    assert diary.lines[1:-2] == [line.format(number) for number in range(1, STEPS) for line in turn]
    failures = [event["who"] for event in outcome.world.events if event["kind"] == "sync_failed"]
    assert failures == ["engine-0", "trainer"]
    assert violations(outcome) == []


def test_a_trainer_that_dies_while_engines_sleep_ends_a_life_and_the_run_goes_on():
    config, deaths = config_of(), [2]

    def tamper(parts: Parts) -> None:
        train = parts.trainer.train

        async def dying(batch: Any) -> Any:
            if batch.step in deaths:
                deaths.remove(batch.step)
                raise ComponentDied("trainer", "killed by signal 9")
            return await train(batch)

        parts.trainer.train = dying

    outcome = simulate(config, Costs(), seed=1, tamper=tamper)
    assert (outcome.finished, outcome.lives) == (True, 2)
    assert violations(outcome) == []


def evaluated(every: int, samples: int, costs: Costs) -> tuple[list[str], list[dict[str, Any]]]:
    """What the evaluator did, and the evaluations."""
    evaluation = EvaluationConfig(every=every, samples=samples, tasks=JsonlTasks(path="given by hand"))
    config = msgspec.structs.replace(config_of(), evaluation=evaluation)
    diary = Diary()

    def tamper(parts: Parts) -> None:
        diary(parts)
        parts.evaluator = SimEngine(parts.engines.members[0]._world, "engine-eval")
        parts.eval_tasks = {"held_out": [Task(id=f"e{i}", prompt="") for i in range(5)]}
        diary.note(parts.evaluator)

    outcome = simulate(config, costs, seed=1, tamper=tamper)
    assert violations(outcome) == []
    lines = [line for line in diary.lines if "engine-eval" in line]
    return lines, [event for event in outcome.world.events if event["kind"] == "evaluated"]


def test_an_evaluator_without_work_sleeps_without_weights_until_its_next_version():
    lines, evaluations = evaluated(every=STEPS, samples=1, costs=Costs(token_s=0.0001, score_s=0.0))
    assert lines == [
        "engine-eval has 0",
        *["engine-eval sleeps without weights"] * STEPS,
        f"engine-eval has {STEPS}",
        "engine-eval wakes",
    ]
    assert [(line["step"], line["version"]) for line in evaluations] == [(0, 0), (STEPS, STEPS)]


def test_an_evaluation_under_way_goes_on_after_the_step_with_the_weights_it_had():
    lines, evaluations = evaluated(every=2, samples=40, costs=Costs(sigma=2.0, score_s=0.0))
    assert lines[:3] == ["engine-eval has 0", "engine-eval sleeps with weights", "engine-eval wakes"]
    # The next evaluation begins when this one has ended, which it could not while its engine sleeps.
    assert lines[3:6] == ["engine-eval sleeps without weights", "engine-eval has 2", "engine-eval wakes"]
    assert [(line["step"], line["version"]) for line in evaluations] == [(0, 0), (2, 2), (4, 4)]
    assert all(line["failed"] == 0 for line in evaluations)


# ── Engines that fail ────────────────────────────────────────────────────────────────────────────────────


class Here:
    """Two engines, a trainer, the publication between them, and their turns."""

    def __init__(self, *, replaces: bool = True) -> None:
        world = World(costs=Costs(stage_s=0.001), dice=random.Random(0))
        self.engines = [SimEngine(world, f"engine-{i}") for i in range(2)]
        self.members = self.engines
        self.trainer = SimTrainer(world)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.replaced: list[str] = []
        self.held: list[bool] = []
        config, replace = config_of(), self.replace if replaces else None
        common: Any = {"engines": self, "telemetry": self, "replace": replace}
        self.publication = Publication(
            config.sync,
            PublicationParts(
                trainer=self.trainer,
                publisher=Publisher(config.sync),
                journal=self,  # type: ignore[arg-type]
                served=lambda: None,
                **common,
            ),
        )
        self.turns = Turns(config, TurnsParts(publication=self.publication, rollouts=self, **common))  # type: ignore[arg-type]

    async def flush(self) -> None: ...

    def event(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def hold_clocks(self, held: bool) -> None:
        self.held.append(held)

    async def replace(self, engine: SimEngine) -> None:
        """Another process in its place, awake and without a version."""
        self.replaced.append(engine.name)
        fresh = SimEngine(engine._world, engine.name)
        engine.__dict__.clear()
        engine.__dict__.update(fresh.__dict__)

    async def publish(self, number: int) -> None:
        self.trainer.weights = 100 + number
        await self.trainer.rename(number)
        version = WeightVersion(number=number, parent=number - 1 if number else None, step=number)
        await (await self.publication.begin(version, self.engines))

    async def engines_turn(self) -> None:
        await self.turns.engines_turn(step=1, generating=True, evaluating=False)

    async def both_turns(self) -> None:
        async with self.turns.trainers_turn(outdated=False, evaluating=False):
            pass
        await self.engines_turn()

    @property
    def asleep(self) -> list[bool]:
        return [engine._asleep for engine in self.engines]

    @property
    def versions(self) -> list[int]:
        return [engine.version for engine in self.engines]


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(main())


def die(engine: SimEngine) -> None:
    """As a process does: every call says so, and it serves nothing."""

    async def dead(*arguments: Any) -> Any:
        raise ComponentDied(engine.name, "killed by signal 9")

    engine.version = -1
    for call in ("sleep", "wake", "announce", "transfer", "verify", "swap"):
        engine.__dict__[call] = dead


async def for_ever(*arguments: Any) -> None:
    await asyncio.sleep(1e6)


def test_what_is_on_its_way_arrives_before_engines_sleep_and_clocks_stand_still_while_they_do():
    async def main() -> None:
        here = Here()
        await here.publish(0)
        transfer = here.engines[1].transfer

        async def slowly(number: int) -> None:
            await asyncio.sleep(5.0)
            await transfer(number)

        here.engines[1].transfer = slowly  # type: ignore[method-assign]
        publishing = asyncio.create_task(here.publish(1))
        await asyncio.sleep(1.0)
        assert here.versions == [1, 0]
        async with here.turns.trainers_turn(outdated=False, evaluating=False):
            assert publishing.done()
            assert (here.versions, here.asleep, here.held) == ([1, 1], [True, True], [True])
        await here.engines_turn()
        assert (here.asleep, here.held) == ([False, False], [True, False])

    virtually(main)


@pytest.mark.parametrize("moment", ["before", "asleep"])
def test_an_engine_that_dies_is_replaced_after_the_step_with_the_version_that_is_published(moment: str):
    async def main() -> None:
        here = Here()
        await here.publish(0)
        if moment == "before":
            die(here.engines[1])
        async with here.turns.trainers_turn(outdated=True, evaluating=False):
            if moment == "asleep":
                die(here.engines[1])
            reviving = asyncio.create_task(here.publication.revive(here.engines[1]))
            await asyncio.sleep(3.0)
            assert here.replaced == [], "the trainer has the memory"
        await here.publish(1)
        await here.engines_turn()
        await reviving
        assert here.replaced == ["engine-1"]
        assert (here.versions, here.asleep) == ([1, 1], [False, False])

    virtually(main)


def test_an_engine_that_dies_while_another_is_woken_is_left_to_who_watches_over_it():
    async def main() -> None:
        here = Here()
        await here.publish(0)
        async with here.turns.trainers_turn(outdated=False, evaluating=False):
            pass
        die(here.engines[0])
        await here.engines_turn()
        assert (here.versions, here.asleep[1]) == ([-1, 0], False)
        await here.publication.revive(here.engines[0])
        assert (here.versions, here.replaced) == ([0, 0], ["engine-0"])

    virtually(main)


@pytest.mark.parametrize("call", ["sleep", "wake"])
@pytest.mark.parametrize("outdated", [True, False])
def test_an_engine_that_gives_no_answer_costs_one_deadline_and_its_process(call: str, outdated: bool):
    async def main() -> None:
        here = Here()
        await here.publish(0)
        here.engines[1].__dict__[call] = for_ever
        begun = asyncio.get_running_loop().time()
        async with here.turns.trainers_turn(outdated=outdated, evaluating=False):
            assert here.asleep == [True, True]
            assert here.engines[1]._has_weights is not outdated
        if outdated:
            await here.publish(1)
        await here.engines_turn()
        assert asyncio.get_running_loop().time() - begun == pytest.approx(DEADLINE_S, rel=0.01)
        assert here.replaced == ["engine-1"]
        assert (here.versions, here.asleep) == ([int(outdated)] * 2, [False, False])
        (stuck,) = [fields for kind, fields in here.events if kind == "engine_stuck"]
        assert stuck["engine"] == "engine-1"
        assert f"the trainer's turn waited 10.0 s for engine-1 to {call}" in stuck["why"]

    virtually(main)


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_without_a_way_to_replace_it_an_engine_that_fails_ends_the_run(call: str):
    async def main() -> None:
        here = Here(replaces=False)
        await here.publish(0)
        die(here.engines[1])
        with pytest.raises(ComponentDied, match="engine-1"):
            await here.both_turns()

        here = Here(replaces=False)
        await here.publish(0)
        here.engines[1].__dict__[call] = for_ever
        with pytest.raises(DeadlineExceeded, match=f"engine-1 to {call}"):
            await here.both_turns()

    virtually(main)


def test_an_engine_without_memory_to_wake_with_ends_the_run_with_its_reason():
    """Another process in its place would find no more."""

    async def main() -> None:
        here = Here()
        await here.publish(0)

        async def no_memory() -> None:
            raise HeadraceError("the device has room for all of a block", "3.0 GiB", "lower engine.cache_tokens")

        here.engines[1].wake = no_memory  # type: ignore[method-assign]
        async with here.turns.trainers_turn(outdated=False, evaluating=False):
            pass
        with pytest.raises(HeadraceError, match=r"lower engine\.cache_tokens"):
            await here.engines_turn()
        assert here.replaced == []

    virtually(main)
