"""How good a version is on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from headrace.engine.base import Sampler
from headrace.records import Episode, Sampling, Task
from headrace.rollout.base import EpisodeRequest, Rollouts
from headrace.scoring.base import Scorers


@dataclass(frozen=True)
class Evaluation:
    """Means over tasks. A failed episode counts as reward 0: a policy is not excused for what it could not do."""

    tasks: int
    samples: int
    pass_1: float
    """Mean reward of one completion."""
    pass_k: float
    """Mean reward of the best of `samples` completions; of rewards 0 and 1, the share of tasks solved at all."""
    length_mean: float
    failed: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


async def evaluate(
    tasks: Sequence[Task],
    *,
    rollouts: Rollouts,
    scorers: Scorers,
    engine: Sampler,
    samples: int,
    sampling: Sampling,
    seed: int,
    concurrency: int,
) -> Evaluation:
    """Sample and score every task on `engine`, whose version stands still meanwhile; `concurrency` at once."""
    slots = asyncio.Semaphore(max(1, concurrency))

    async def attempt(task: Task, place: int, sample: int) -> Episode:
        request = EpisodeRequest(
            id=f"eval/{place}/{sample}",
            task=task,
            seed=(seed * 1_000_003 + place * 1009 + sample + 1) & 0x7FFF_FFFF_FFFF,
            engine=engine,
            sampling=sampling,
        )
        async with slots:
            episode = await rollouts.run(request)
            return await scorers.score(episode) if episode.failure is None else episode

    work = [attempt(task, place, s) for place, task in enumerate(tasks) for s in range(samples)]
    episodes = await asyncio.gather(*work)
    rewards = [e.reward if e.reward is not None and e.failure is None else 0.0 for e in episodes]
    best = [max(rewards[i : i + samples]) for i in range(0, len(rewards), samples)]
    return Evaluation(
        tasks=len(tasks),
        samples=samples,
        pass_1=sum(rewards) / len(rewards),
        pass_k=sum(best) / len(best),
        length_mean=sum(e.num_tokens for e in episodes) / len(episodes),
        failed=sum(e.failure is not None for e in episodes),
    )
