"""`sync.check_served`: what an engine acknowledged is compared with what it serves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.buffer.config import BufferConfig
from headrace.config.run import ModelConfig, RunConfig
from headrace.errors import LawBroken
from headrace.pipeline import Parts
from headrace.rollout.config import PythonTasks
from headrace.simulator.engine import SimEngine
from headrace.simulator.run import Outcome, simulate
from headrace.simulator.world import Costs
from headrace.sync.config import SyncConfig
from headrace.training.config import TrainingConfig


def run(
    tamper: Callable[[SimEngine], None] | None = None, *, check: bool = True, costs: Costs | None = None
) -> Outcome:
    config = RunConfig(
        model=ModelConfig(path=""),
        tasks=PythonTasks(source="a:b"),
        buffer=BufferConfig(max_staleness=2),
        training=TrainingConfig(steps=12, groups_per_batch=2, group_size=2, checkpoint_every=4),
        sync=SyncConfig(check_served=check),
    )

    def every_engine(parts: Parts) -> None:
        for engine in parts.engines.members:
            if tamper is not None:
                tamper(engine)

    return simulate(config, costs or Costs(), seed=3, engines=2, tamper=every_engine)


def published(outcome: Outcome) -> list[dict]:
    return [event for event in outcome.world.events if event["kind"] == "published"]


def leaves_the_weights(engine: SimEngine) -> None:
    """From its third swap on."""
    swap, swaps = engine.swap, 0

    async def wrong(number, interrupt):
        nonlocal swaps
        before, swaps = engine._weights, swaps + 1
        report = await swap(number, interrupt)
        if swaps > 2:
            engine._weights = before
        return report

    engine.swap = wrong


def does_not_swap(engine: SimEngine) -> None:
    """Though it says so, from its third swap on."""
    swap, swaps = engine.swap, 0

    async def wrong(number, interrupt):
        nonlocal swaps
        before, swaps = (engine._served, engine._weights), swaps + 1
        report = await swap(number, interrupt)
        if swaps > 2:
            engine._served, engine._weights = before
        return report

    engine.swap = wrong


def test_every_publication_says_what_each_engine_serves():
    events = published(run())
    assert len(events) >= 5
    for event in events:
        assert event["served"] == dict.fromkeys(["engine-0", "engine-1"], event["checksum"])


def test_an_engine_that_acknowledged_and_kept_its_old_weights_ends_the_run():
    what = r"atomic swap\) at engine-0: version \d+ was acknowledged, and other bytes are served for w"
    with pytest.raises(LawBroken, match=what):
        run(leaves_the_weights)


def test_an_engine_that_acknowledged_and_serves_another_version_ends_the_run():
    with pytest.raises(LawBroken, match=r"at engine-0: version (\d+) was acknowledged, and version \d+ is served"):
        run(does_not_swap)


def test_without_the_check_nobody_asks():
    def silent(engine: SimEngine) -> None:
        async def fingerprint(adapter=None):
            raise AssertionError("nobody asked for this")

        engine.fingerprint = fingerprint

    events = published(run(silent, check=False))
    assert len(events) >= 5
    assert all("served" not in event for event in events)


def test_an_engine_that_dies_before_it_can_answer_is_not_taken_for_a_liar():
    outcome = run(costs=Costs(sync_failure=0.05))
    assert outcome.finished
    assert outcome.lives > 1
    for event in published(outcome):
        assert set(event["served"].values()) <= {event["checksum"]}
