"""Pass rates on held-out tasks."""

from __future__ import annotations

import random

import pytest

from headrace.evaluation import evaluate
from headrace.records import Sampling, Task
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.world import Costs, SimRollouts, World


def test_means_are_over_tasks_and_a_failed_episode_counts_as_wrong():
    rewards = {"eval/0/0": 1.0, "eval/0/1": 0.0, "eval/1/0": 0.0, "eval/1/1": 0.0, "eval/2/0": 1.0}

    class Scorers:
        async def score(self, episode):
            if episode.id not in rewards:
                return episode.with_(failure="scorer_error")
            return episode.with_(reward=rewards[episode.id])

    async def main():
        world = World(costs=Costs(), dice=random.Random(0))
        return await evaluate(
            [Task(id=str(i), prompt="") for i in range(3)],
            rollouts=SimRollouts(world),
            scorers=Scorers(),
            engine=SimEngine(world, "engine"),
            samples=2,
            sampling=Sampling(),
            seed=0,
            concurrency=2,
        )

    result = run_virtual(main())
    assert (result.tasks, result.samples, result.failed) == (3, 2, 1)
    assert result.pass_1 == pytest.approx(2 / 6)
    assert result.pass_k == pytest.approx(2 / 3)
    assert result.length_mean > 0
