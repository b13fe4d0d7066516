"""How good a version is on held-out tasks.

    an attempt that ended              counts as its reward
    one that the policy made fail      counts as `failure_reward`: a policy is not excused for what it could not do
    one that anything else made fail   stands apart: nobody knows what its reward would have been

What stands apart is in no mean; beyond a share of it the evaluation is invalid, and its version never the best.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from headrace.bounds import SYSTEM_REASONS, clip
from headrace.config.evaluation import HELD_OUT, EvaluationSet
from headrace.engine.base import Sampler
from headrace.records import Episode, Task
from headrace.rollout.base import EpisodeRequest, Rollouts
from headrace.scoring.base import Scorers
from headrace.scoring.estimates import best_of, interval_of_means, ks_up_to, wilson
from headrace.telemetry.evaluations import metric_of, sets_of
from headrace.telemetry.metrics import mean, users_means

MAX_EXAMPLE = 300
"""Characters of a failure's detail that an evaluation shows."""


class Attempted(NamedTuple):
    """What became of one completion of a task."""

    reward: float | None
    """None: it stands apart."""
    failure: str | None
    detail: str
    tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Evaluation:
    """Means over tasks, of the completions that count."""

    tasks: int
    samples: int
    metric: str
    """What the rewards are: "accuracy" where all are 0 or 1, otherwise "reward"."""
    pass_1: float | None
    """Mean reward of one completion. None where none counts."""
    pass_k: float | None
    """The same of the best of `samples` completions; of rewards 0 and 1, the share of tasks solved at all."""
    pass_at: dict[str, float | None]
    """The same of the best of k, by k: pass@k, of rewards 0 and 1. Over tasks of which at least k count."""
    low95: float | None
    high95: float | None
    """The 95 % interval of `pass_1`, over tasks."""
    interval: str | None
    """How it was found: "wilson", of one completion a task and rewards 0 and 1, or "student", of tasks' means."""
    length_mean: float | None
    """Sampled tokens of a completion that counts."""
    failed: int
    """Completions that stand apart."""
    failed_frac: float
    valid: bool
    """Whether few enough stand apart, and any counts."""
    policy_failed: int
    """Completions that count as `failure_reward`."""
    failures: dict[str, int] = field(default_factory=dict)
    """All failures, by reason."""
    failure_example: str = ""
    """One of those that stand apart by the commonest reason."""
    user: dict[str, float] = field(default_factory=dict)
    """Means of what environment and scorer gave, over the completions that have it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def blames_policy(episode: Episode) -> bool:
    """Whether an environment's failure is the policy's own: the environment said so, or the policy went beyond what
    an episode may hold."""
    if episode.failure == "prompt_too_long":
        # Before the first turn it is the task that is too long.
        return len(episode.turns) > 0
    return episode.failure == "too_many_samples" or episode.failure not in SYSTEM_REASONS


async def evaluate(
    tasks: Sequence[Task],
    settings: EvaluationSet,
    *,
    rollouts: Rollouts,
    scorers: Scorers,
    engine: Sampler,
    seed: int,
    concurrency: int,
    name: str = HELD_OUT,
) -> Evaluation:
    """Sample and score every task on `engine`, whose version stands still meanwhile; `concurrency` at once."""
    slots = asyncio.Semaphore(max(1, concurrency))
    prefix, salt = ("eval", 0) if name == HELD_OUT else (f"eval/{name}", zlib.crc32(name.encode()))
    sampling = settings.sampling.sampling()

    async def attempt(task: Task, place: int, sample: int) -> Attempted:
        request = EpisodeRequest(
            id=f"{prefix}/{place}/{sample}",
            task=task,
            seed=((seed + salt) * 1_000_003 + place * 1009 + sample + 1) & 0x7FFF_FFFF_FFFF,
            engine=engine,
            sampling=sampling,
        )
        async with slots:
            episode = await rollouts.run(request)
            blamed = episode.failure is not None and blames_policy(episode)
            if episode.failure is None:
                episode = await scorers.score(episode)
        reward = settings.failure_reward if blamed else episode.reward if episode.failure is None else None
        return Attempted(reward, episode.failure, episode.detail, episode.num_tokens, episode.metrics)

    work = [attempt(task, place, s) for place, task in enumerate(tasks) for s in range(settings.samples)]
    ended = await asyncio.gather(*work)
    return summarise(
        [ended[i : i + settings.samples] for i in range(0, len(ended), settings.samples)],
        max_failed=settings.max_failed,
    )


def summarise(attempts: Sequence[Sequence[Attempted]], *, max_failed: float) -> Evaluation:
    """The evaluation, from the attempts at each task."""
    samples = max(map(len, attempts))
    everything = [one for row in attempts for one in row]
    counted = [one for one in everything if one.reward is not None]
    apart = [one for one in everything if one.reward is None]
    rewards = [[one.reward for one in row if one.reward is not None] for row in attempts]
    known = [row for row in rewards if row]
    plain = all(reward in (0, 1) for row in known for reward in row)
    pass_at = {str(k): _mean([best_of(row, k) for row in known if len(row) >= k]) for k in ks_up_to(samples)}
    interval, how = _interval(known, once=samples == 1, plain=plain)
    failed_frac = len(apart) / len(everything)
    return Evaluation(
        tasks=len(attempts),
        samples=samples,
        metric="accuracy" if plain else "reward",
        pass_1=pass_at["1"],
        pass_k=pass_at[str(samples)],
        pass_at=pass_at,
        low95=None if interval is None else interval[0],
        high95=None if interval is None else interval[1],
        interval=how,
        length_mean=_mean([one.tokens for one in counted]),
        failed=len(apart),
        failed_frac=failed_frac,
        valid=bool(counted) and failed_frac <= max_failed,
        policy_failed=sum(one.failure is not None for one in counted),
        failures=dict(Counter(one.failure for one in everything if one.failure is not None).most_common()),
        failure_example=_example(apart),
        user=users_means(one.metrics for one in counted),
    )


def _interval(
    rewards: Sequence[Sequence[float]], *, once: bool, plain: bool
) -> tuple[tuple[float, float] | None, str | None]:
    """Tasks are what is independent: completions of one task resemble each other."""
    means = [mean(row) for row in rewards]
    if not means:
        return None, None
    # Where all tasks came out alike, their spread says nothing of the next one.
    if plain and (once or (len(set(means)) == 1 and means[0] in (0, 1))):
        return wilson(round(sum(means)), len(means)), "wilson"
    found = interval_of_means(means)
    if found is not None and plain:
        found = max(0.0, found[0]), min(1.0, found[1])
    return found, None if found is None else "student"


def _example(apart: Sequence[Attempted]) -> str:
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in apart:
        reasons[str(one.failure)].append(one.detail)
    if not reasons:
        return ""
    reason, details = max(reasons.items(), key=lambda item: len(item[1]))
    detail = next((text for text in details if text), "")
    return f"{reason}: {clip(detail, MAX_EXAMPLE)}" if detail else reason


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def evaluation_line(name: str, result: Evaluation, before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The evaluation of a set as events have it. Rewards that were something else than 0 and 1 before make it a
    reward, though they happen to be 0 or 1 this time."""
    line = result.as_dict()
    if any(metric_of(sets_of(one)[name]) == "reward" for one in before if name in sets_of(one)):
        line["metric"] = "reward"
    return line


def is_best(value: float, name: str, before: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it is above all valid evaluations of the same set, where that was the one that chooses."""
    rivals = [line["pass_1"] for line in before if line.get("set", HELD_OUT) == name and line.get("valid", True)]
    return all(rival is None or value > rival for rival in rivals)
