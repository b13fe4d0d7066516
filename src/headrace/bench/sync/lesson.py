"""A task that a small model can learn, for the benchmarks that need a real run: stay within the prompt's family.

    prompt       w17 w22 w16 w19 …        words of one family (here w16 … w23)
    completion   w20 w3 w18 w51 …         the reward is the share of its words that are of that family

The model begins with worked examples half of whose words are of the family: it knows the families, and
reinforcement can make it prefer the prompt's. It is the quickstart's, as wide and deep as is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.small_model import small_config, write_tokenizer
from headrace.records import Task
from headrace.scoring.base import Attempt

if TYPE_CHECKING:
    from headrace.models import ModelConfig

FAMILIES, FAMILY = 8, 8
WORDS = FAMILIES * FAMILY
PROMPT_TOKENS, COMPLETION_TOKENS = 12, 13


def tasks(count: int, seed: int) -> Iterator[Task]:
    dice = random.Random(seed)
    for number in range(count):
        family = dice.randrange(FAMILIES)
        yield Task(id=str(number), prompt=_text(_of_family(family, PROMPT_TOKENS, dice)), data={"family": family})


def score(task: Task, attempt: Attempt) -> float:
    tokens = attempt.turns[-1].tokens
    return sum(token // FAMILY == task.data["family"] for token in tokens) / max(1, len(tokens))


def model_config(hidden: int, layers: int) -> ModelConfig:
    return small_config(WORDS, hidden, layers, 128, initializer_range=hidden**-0.5)


def make_model(folder: Path, *, hidden: int, layers: int, seed: int, warm_steps: int = 60, batch: int = 16) -> int:
    """Write the model and its tokenizer to a new folder; returns how many parameters it has."""
    import torch

    from headrace.models import PackedContext, random_model, save_model

    config = model_config(hidden, layers)
    model = random_model(config, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    dice = random.Random(seed)
    length = PROMPT_TOKENS + COMPLETION_TOKENS
    told = torch.tensor(([False] * (PROMPT_TOKENS - 1) + [True] * COMPLETION_TOKENS + [False]) * batch)
    for step in range(warm_steps):
        tokens = torch.tensor([token for _ in range(batch) for token in _example(dice)])
        context = PackedContext([length] * batch)
        kept = model(tokens, context.positions, context)[told]
        logprobs, _ = model.ops.token_logprobs(kept, model.head_weight, tokens.roll(-1)[told])
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 10)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    folder.mkdir(parents=True)
    save_model(model, config, folder)
    write_tokenizer(folder, WORDS)
    return sum(parameter.numel() for parameter in model.parameters())


def _example(dice: random.Random) -> list[int]:
    family = dice.randrange(FAMILIES)
    completion = [
        _of_family(family, 1, dice)[0] if dice.random() < 0.5 else dice.randrange(WORDS)
        for _ in range(COMPLETION_TOKENS)
    ]
    return [*_of_family(family, PROMPT_TOKENS, dice), *completion]


def _of_family(family: int, count: int, dice: random.Random) -> list[int]:
    return [family * FAMILY + dice.randrange(FAMILY) for _ in range(count)]


def _text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)
