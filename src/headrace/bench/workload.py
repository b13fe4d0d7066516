"""The workload of `headrace bench loop` and `e2e`: completions of given lengths, and a scorer that waits."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace.bench.small_model import small_config, write_tokenizer
from headrace.records import Task
from headrace.rollout.base import Policy
from headrace.scoring.base import Attempt

VOCABULARY = 64
PROMPT_TOKENS = 16


def tasks(
    count: int,
    group_size: int,
    median: int,
    sigma: float,
    cap: int,
    seed: int,
    prompt_tokens: int = PROMPT_TOKENS,
    vocabulary: int = VOCABULARY,
) -> Iterator[Task]:
    """Each with the lengths of its episodes: log-normal, capped. The same for the same seed."""
    dice = random.Random(seed)
    for number in range(count):
        lengths = [min(cap, max(1, round(dice.lognormvariate(0, sigma) * median))) for _ in range(group_size)]
        prompt = [dice.randrange(vocabulary) for _ in range(prompt_tokens)]
        yield Task(id=str(number), prompt=f"task {number}", data={"lengths": lengths, "prompt": prompt})


class GivenLengths:
    """Samples exactly as many tokens as the task says for its first, second, … episode."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    async def rollout(self, task: Task, policy: Policy) -> None:
        lengths = task.data["lengths"]
        place = self._begun[task.id]
        self._begun[task.id] += 1
        await policy.sample(task.data["prompt"], max_tokens=lengths[place % len(lengths)])


async def waiting_score(task: Task, attempt: Attempt, mean_s: float = 0.0) -> float:
    """A reward after a wait, as of a judge or a sandbox: uniform between half and 1.5 times the mean."""
    dice = random.Random(f"{task.id}/{attempt.turns[-1].tokens[:4]}")
    if mean_s > 0:
        await asyncio.sleep(mean_s * dice.uniform(0.5, 1.5))
    return dice.random()


def make_model(folder: Path, *, hidden: int, layers: int, max_positions: int, seed: int) -> None:
    """A random model, whose completions only the wanted length ends."""
    from headrace.models import random_model, save_model

    config = small_config(VOCABULARY, hidden, layers, max_positions)
    folder.mkdir(parents=True)
    save_model(random_model(config, seed), config, folder)
    write_tokenizer(folder, VOCABULARY)
