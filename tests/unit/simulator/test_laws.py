"""The real pipeline in virtual time, through delays, failures and crashes: no law is broken.

And the other way round: each law, broken on purpose, is noticed.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from outcome_builders import violations

from headrace.buffer.base import Ticket
from headrace.buffer.config import BufferConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.engine.config import NativeEngineConfig
from headrace.errors import ComponentDied, GaveUp, LawBroken
from headrace.pipeline import Parts
from headrace.records import Group, Sampling, Support, Turn
from headrace.rollout.config import PythonTasks
from headrace.scoring.advantages import advantages
from headrace.simulator.run import Outcome, simulate
from headrace.simulator.world import Costs
from headrace.sync.base import Seal
from headrace.sync.config import SyncConfig
from headrace.training.algorithms import DapoConfig, GrpoConfig, PpoConfig
from headrace.training.config import DistillationConfig, TrainingConfig

RUNS, CHUNKS = 5000, 25


def random_config(dice: random.Random) -> RunConfig:
    batch, size = dice.randint(1, 4), dice.randint(1, 4)
    least = dice.randint(1, size)
    kind = dice.choice(["none", "double", "bounded", "unbounded"])
    staleness = {"none": [None], "double": [None, 2], "bounded": [None, 0, 1, 4], "unbounded": [None, 3]}[kind]
    buffer = BufferConfig(
        type=kind,
        max_staleness=dice.choice(staleness),
        order=dice.choice(["fifo", "windowed", "first_finished"]),
        depth=dice.choice([None, 2 * batch]) if kind == "bounded" else None,
        late=dice.choice(["wait", "drop"]),
    )
    bound = buffer.staleness_bound
    config = RunConfig(
        model=ModelConfig(path=""),
        tasks=PythonTasks(source="a:b"),
        seed=dice.randint(0, 1000),
        buffer=buffer,
        engine=NativeEngineConfig(max_running=dice.choice([2, 8, 64])),
        training=TrainingConfig(
            steps=dice.randint(2, 12),
            groups_per_batch=batch,
            group_size=size,
            min_group=least,
            checkpoint_every=dice.randint(1, 5),
            epochs=dice.randint(1, 3),
            algorithm=PpoConfig() if least < 2 else DapoConfig() if dice.random() < 0.3 else GrpoConfig(),
        ),
        sync=random_sync(dice, most=min(3, (5 if bound is None else bound) + 1)),
        placement=dice.choice(["side_by_side", "turns"]),
    )
    config.check()
    config.buffer.check()
    config.training.check()
    return config


def random_sync(dice: random.Random, most: int) -> SyncConfig:
    schedule = dice.choice(["never_stop", "blocking"])
    interrupts = ["keep", "recompute", "resume", "retry", *(["drain"] if schedule == "never_stop" else [])]
    config = SyncConfig(interval=dice.randint(1, most), schedule=schedule, interrupt=dice.choice(interrupts))
    config.check()
    return config


def random_costs(dice: random.Random) -> Costs:
    return Costs(
        sigma=dice.choice([0.3, 1.0, 2.0]),
        step_s=dice.choice([0.1, 0.5, 2.0]),
        score_s=dice.choice([0.01, 0.5]),
        environment_failure=dice.choice([0.0, 0.05, 0.2]),
        scorer_failure=dice.choice([0.0, 0.05, 0.2]),
        sync_failure=dice.choice([0.0, 0.0, 0.01]),
    )


def random_run(seed: int) -> tuple[RunConfig, Outcome]:
    dice = random.Random(seed)
    config = random_config(dice)
    crashes = [dice.expovariate(1 / 3) for _ in range(dice.choice([0, 1, 2, 3]))]
    costs, engines = random_costs(dice), dice.randint(1, 3)
    return config, simulate(config, costs, seed=seed, engines=engines, crashes=crashes)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_law_breaks_in_thousands_of_runs_with_delays_failures_and_crashes(chunk):
    lives = 0
    for seed in range(chunk * RUNS // CHUNKS, (chunk + 1) * RUNS // CHUNKS):
        _, outcome = random_run(seed)
        assert outcome.finished, f"seed {seed}"
        assert violations(outcome) == [], f"seed {seed}"
        sums = outcome.world.ledger.sums()
        assert sums["in_flight"] == 0, f"seed {seed}"
        assert sums["admitted"] == sums["trained"] + sum(sums["dropped"].values()), f"seed {seed}"
        lives += outcome.lives
    assert lives > RUNS // CHUNKS, "the controller crashed now and then"


def test_a_run_is_reproducible():
    (_, one), (_, two) = random_run(11), random_run(11)
    assert one.world.ledger.sums() == two.world.ledger.sums()
    assert one.seconds == two.seconds


def test_groups_that_teach_nothing_are_sampled_anew_and_counted():
    outcome = simulate(RESAMPLING, Costs(), seed=5)
    rewards = [[e.reward for e in group.episodes] for batch, _ in outcome.world.batches for group in batch.groups]
    assert len(rewards) == 24
    assert all(len(set(group)) > 1 for group in rewards)
    sums = outcome.world.ledger.sums()
    assert sums["trained"] == 48
    assert sums["dropped"]["equal_rewards"] > 20
    assert violations(outcome) == []


def test_a_group_that_only_its_truncated_episodes_tell_apart_is_sampled_anew():
    """Every other episode was cut and is left out: of a group of four, two are compared."""

    def tamper(parts: Parts) -> None:
        score = parts.scorers.score

        async def cut(episode):
            scored = await score(episode)
            stop = "length" if int(episode.id[-1]) % 2 else "end"
            return scored.with_(turns=tuple(msgspec.structs.replace(turn, stop=stop) for turn in scored.turns))

        parts.scorers.score = cut

    training = msgspec.structs.replace(RESAMPLING.training, group_size=4, min_group=4, truncated="exclude")
    outcome = simulate(msgspec.structs.replace(RESAMPLING, training=training), Costs(), seed=5, tamper=tamper)
    batches = [batch for batch, _ in outcome.world.batches]
    groups = [group for batch in batches for group in batch.groups]
    assert len(groups) == 24
    assert all(len({e.reward for e in group.episodes if e.turns[-1].stop == "end"}) == 2 for group in groups)
    for batch in batches:
        for episode, advantage in zip(batch.episodes, batch.advantages.tolist(), strict=True):
            assert (advantage == 0) == (episode.turns[-1].stop == "length")
    sums = outcome.world.ledger.sums()
    assert sums["trained"] == 96, "also those that were left out of the loss"
    assert sums["dropped"]["equal_rewards"] > 20
    assert violations(outcome) == []


def test_a_run_without_anything_to_learn_ends_with_the_reason():
    """After some steps; these are not lost."""
    worlds = []

    def tamper(parts: Parts) -> None:
        world, scored, happens = parts.scorers._world, itertools.count(), parts.scorers._world.happens
        world.happens = lambda probability: happens(probability) if next(scored) < 100 else probability > 0
        worlds.append(world)

    with pytest.raises(GaveUp, match="of the last 116 groups none had anything to learn from"):
        simulate(RESAMPLING, Costs(), seed=5, tamper=tamper)
    done = len(worlds[0].batches)
    assert done > 0
    assert worlds[0].checkpoints[-1][0]["step"] == done
    assert worlds[0].ledger.sums()["in_flight"] == 0


def test_shuffled_rewards_are_not_recorded():
    given: dict[str, float] = {}

    def tamper(parts: Parts) -> None:
        score = parts.scorers.score

        async def remember(episode):
            scored = await score(episode)
            given[scored.id] = scored.reward
            return scored

        parts.scorers.score = remember

    training = msgspec.structs.replace(STEADY.training, shuffle_rewards=True)
    outcome = simulate(msgspec.structs.replace(STEADY, training=training), Costs(), seed=5, tamper=tamper)
    batches = [batch for batch, _ in outcome.world.batches]
    assert all(e.reward == given[e.id] for batch in batches for e in batch.episodes)
    assert any(not np.array_equal(batch.advantages, advantages(batch.groups)) for batch in batches)


def test_a_teacher_that_a_resumed_run_still_has_is_no_change():
    """The trainer dies before step 8, in the middle of a teacher's turn."""
    training = msgspec.structs.replace(STEADY.training, steps=10, checkpoint_every=1)
    lives = []

    def teach(parts: Parts):
        train, checkpoints = parts.trainer.train, parts.trainer._world.checkpoints
        lives.append(parts)

        async def taught(batch):
            if batch.step == 8 and len(lives) == 1:
                assert checkpoints[-1][0]["teacher"] == 4
                raise ComponentDied("trainer", "on purpose")
            report = await train(batch)
            return msgspec.structs.replace(report, teacher=max(0, (batch.step - 1) // 2 * 2 - 2))

        parts.trainer.train = taught

    outcome = simulate(msgspec.structs.replace(STEADY, training=training), Costs(), seed=3, tamper=teach)
    assert outcome.lives == 2
    events = [event for event in outcome.world.events if event["kind"] == "teacher"]
    assert [(event["step"], event["version"]) for event in events] == [(1, 0), (5, 2), (7, 4), (9, 6)]


def alarms(config: RunConfig, metric: str) -> list[dict[str, Any]]:
    """Of a run in which that metric is 1 at each step."""

    def tamper(parts: Parts) -> None:
        train = parts.trainer.train

        async def measured(batch):
            report = await train(batch)
            return msgspec.structs.replace(report, metrics=report.metrics | {metric: 1.0})

        parts.trainer.train = measured

    outcome = simulate(config, Costs(), seed=3, tamper=tamper)
    return [event for event in outcome.world.events if event["kind"] == "alarm"]


def test_alarms_are_events_with_advice():
    (alarm,) = alarms(STEADY, "drift_kl")
    assert (alarm["metric"], alarm["on"], alarm["step"]) == ("drift_kl", True, 5)
    assert "max_staleness" in alarm["advice"]


def test_equal_rewards_are_no_alarm_where_a_teacher_alone_teaches():
    taught = msgspec.structs.replace(STEADY.training, distillation=DistillationConfig(teacher="there"))
    (alarm,) = alarms(STEADY, "zero_advantage_frac")
    assert alarm["metric"] == "zero_advantage_frac"
    assert alarms(msgspec.structs.replace(STEADY, training=taught), "zero_advantage_frac") == []


# ── Laws broken on purpose ───────────────────────────────────────────────────────────────────────────────

STEADY = RunConfig(
    model=ModelConfig(path=""),
    tasks=PythonTasks(source="a:b"),
    buffer=BufferConfig(type="bounded", max_staleness=2),
    training=TrainingConfig(steps=12, groups_per_batch=2, group_size=2, checkpoint_every=4),
)
RESAMPLING = msgspec.structs.replace(
    STEADY, training=msgspec.structs.replace(STEADY.training, algorithm=DapoConfig())
)


def laws_broken(tamper) -> set[str]:
    outcome = simulate(STEADY, Costs(), seed=3, tamper=tamper)
    return {v.law for v in violations(outcome)}


def test_the_untampered_run_is_clean():
    assert laws_broken(None) == set()


def test_a_broken_admission_rule_is_noticed_when_the_batch_leaves():
    def tamper(parts: Parts) -> None:
        parts.buffer._admissible = lambda: parts.buffer.outstanding < 20

    with pytest.raises(LawBroken, match="staleness bound"):
        laws_broken(tamper)


def test_a_broken_admission_rule_is_noticed_by_the_audit():
    def tamper(parts: Parts) -> None:
        parts.buffer._bound = 6

    assert laws_broken(tamper) == {"staleness bound"}


def test_a_lost_episode_is_noticed():
    def tamper(parts: Parts) -> None:
        drop = parts.journal.drop
        parts.scorers._world.costs = Costs(scorer_failure=0.2)
        parts.journal.drop = lambda episode, reason: None if reason == "scorer_error" else drop(episode, reason)

    assert "ledger" in laws_broken(tamper)


def test_an_episode_that_vanished_from_the_file_is_noticed():
    outcome = simulate(STEADY, Costs(), seed=3)
    outcome.world.ledger.query("DELETE FROM episodes WHERE id = 'g0000005/1'")
    found = violations(outcome)
    assert ("ledger", "group 5") in {(v.law, v.where) for v in found}
    assert ("ledger", "g0000005/1") in {(v.law, v.where) for v in found}


def test_a_token_with_the_wrong_version_is_noticed():
    def tamper(parts: Parts) -> None:
        for engine in parts.engines.members:
            make = engine._turn

            def wrong(*args: Any, make=make):
                turn = make(*args)
                return msgspec.structs.replace(turn, versions=turn.versions - (turn.versions > 0))

            engine._turn = wrong

    assert "provenance" in laws_broken(tamper)


def test_a_version_from_the_future_that_is_trained_on_is_noticed():
    def later(turn: Turn) -> Turn:
        lineage = tuple(msgspec.structs.replace(e, version=e.version + 5) for e in turn.lineage)
        return msgspec.structs.replace(turn, versions=turn.versions + 5, lineage=lineage)

    def tamper(parts: Parts) -> None:
        put = parts.buffer.put

        async def wrong(ticket: Ticket, group: Group) -> None:
            episodes = tuple(e.with_(turns=tuple(map(later, e.turns))) for e in group.episodes)
            await put(ticket, msgspec.structs.replace(group, episodes=episodes))

        parts.buffer.put = wrong

    assert "staleness bound" in laws_broken(tamper)


def test_turns_that_cannot_be_right_are_dropped_at_the_door_and_counted():
    spoiled = []

    def spoil(turn: Turn) -> Turn:
        others = Support.from_rows([np.array([token + 1]) for token in turn.tokens])
        ways: list[dict[str, Any]] = [
            {"versions": turn.versions + 50},
            {"logprobs": np.full_like(turn.logprobs, np.nan)},
            {"logprobs": turn.logprobs[:-1]},
            {"support": others, "sampling": Sampling(top_k=1)},
            {
                "support": Support.from_rows([np.array([token, -1]) for token in turn.tokens]),
                "sampling": Sampling(top_k=1),
            },
        ]
        return msgspec.structs.replace(turn, **ways[len(spoiled) % len(ways)])

    def tamper(parts: Parts) -> None:
        dice = random.Random(0)
        for engine in parts.engines.members:
            make = engine._turn

            def wrong(*args: Any, make=make):
                turn = make(*args)
                if len(turn.tokens) == 0 or dice.random() > 0.1:
                    return turn
                spoiled.append(turn)
                return spoil(turn)

            engine._turn = wrong

    config = msgspec.structs.replace(
        STEADY, training=msgspec.structs.replace(STEADY.training, min_group=1, algorithm=PpoConfig())
    )
    outcome = simulate(config, Costs(), seed=3, tamper=tamper)
    assert outcome.finished
    assert violations(outcome) == []
    dropped = outcome.world.ledger.sums()["dropped"]
    assert 0 < dropped["bad_turn"] <= len(spoiled)
    named = [event for event in outcome.world.events if event.get("reason") == "bad_turn"]
    assert named
    assert all(event["episode"] in event["detail"] for event in named)
    trained = [turn for batch, _ in outcome.world.batches for e in batch.episodes for turn in e.turns]
    assert trained
    assert all(turn.fault() is None and turn.support is None for turn in trained)
    assert all(np.isfinite(turn.logprobs).all() and turn.versions.max() < 50 for turn in trained)


def test_a_reused_version_number_is_noticed():
    def tamper(parts: Parts) -> None:
        stage = parts.trainer.stage

        async def reuse(version, to):
            if version.number == 3:
                parts.telemetry.event("published", version=2, step=2, checksum=parts.trainer.weights)
            return await stage(version, to)

        parts.trainer.stage = reuse

    assert laws_broken(tamper) == {"atomic swap"}


def test_a_version_published_before_it_was_durable_is_noticed():
    def tamper(parts: Parts) -> None:
        parts.journal.version = lambda version: None

    assert "ledger" in laws_broken(tamper)


def test_an_engine_that_serves_what_it_did_not_verify_is_refused():
    def tamper(parts: Parts) -> None:
        for engine in parts.engines.members:

            async def skip(seal: Seal) -> None: ...

            engine.verify = skip

    with pytest.raises(Exception, match="not verified"):
        laws_broken(tamper)
