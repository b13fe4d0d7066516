"""Versions swapped under load, one right after the other, and what the recorded log-probs say about each pass.

The model of each version differs from every other's in every tensor, so much that a pass with one tensor of another
version gives other log-probs to its tokens. Requests are short and many. A request's tokens up to the first swap it
meets depend on one version alone: all of them are computed again, a version's at a time, by a model that has only
that version. Tokens after a swap, over keys and values that older versions left, are replayed for some requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from native_process import VOCAB, Published, native_process, version_of

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.models import CausalLM, PackedContext
from headrace.records import Turn, WeightVersion
from headrace.testing.serving import take_in

RUNNING = 24
REPLAYED = 150
TOLERANCE = 1e-4


@dataclass
class Load:
    turns: list[Turn] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    """Requests that each swap met."""


async def swap_under_load(process: Published, swaps: int) -> Load:
    """RUNNING requests at a time while that many versions are published, one right after the other."""
    engine, load = process.engine, Load()
    ids, dice, swapping = itertools.count(1), np.random.default_rng(0), True

    async def ask(most: int) -> None:
        number = next(ids)
        context = dice.integers(0, VOCAB, dice.integers(3, 9)).astype(np.int32)
        asked = SampleRequest(id=number, context=context, max_tokens=int(dice.integers(1, most + 1)), seed=number)
        load.turns.append(await engine.sample(asked))

    async def keep_busy() -> None:
        while swapping:
            await ask(12)

    async def publish(number: int) -> None:
        manifest, seal = await process.stage(WeightVersion(number=number, parent=number - 1, step=number))
        await take_in(engine, manifest, seal, swap=False)
        load.running.append((await engine.swap(number, "keep")).running)

    await publish(1)
    busy = [asyncio.create_task(keep_busy()) for _ in range(RUNNING)]
    for number in range(2, swaps + 2):
        await publish(number)
        # Begun under this version: so there is no version that no pass was seen of.
        await ask(1)
    swapping = False
    await asyncio.gather(*busy)
    return load


def swapped(folder: Path, swaps: int, **process: Any) -> Load:
    """`process` is for `native_process`."""
    for number in range(swaps + 2):
        version_of(number)

    async def scenario() -> Load:
        async with native_process(folder, max_running=RUNNING + 1, max_context=64, **process) as engine:
            return await swap_under_load(engine, swaps)

    return asyncio.run(asyncio.wait_for(scenario(), 240))


@dataclass
class Check:
    tokens: int
    """Compared with a model of their version alone."""
    versions: int
    mixed: int
    """Tokens that no one version gives."""
    replayed: int
    mixed_replayed: int


def check(load: Load, tolerance: float = TOLERANCE) -> Check:
    of_version: dict[int, list[Turn]] = defaultdict(list)
    for turn in load.turns:
        of_version[turn.lineage[0].version].append(turn)
    tokens = mixed = 0
    for number, turns in of_version.items():
        off = off_by(version_of(number), turns)
        tokens += len(off)
        mixed += int((off > tolerance).sum())
    several = [turn for turn in load.turns if len(turn.lineage) > 1]
    some = [several[i] for i in np.linspace(0, len(several) - 1, REPLAYED).astype(int)]
    replayed = [np.abs(replay_logprobs(version_of, turn.context, turn) - turn.logprobs) for turn in some]
    return Check(
        tokens=tokens,
        versions=len(of_version),
        mixed=mixed,
        replayed=sum(map(len, replayed)),
        mixed_replayed=int(sum((off > tolerance).sum() for off in replayed)),
    )


def off_by(model: CausalLM, turns: list[Turn]) -> np.ndarray:
    """By how much the log-probs differ from this model's, of all tokens sampled before the first swap."""
    counts = [before_the_first_swap(turn) for turn in turns]
    sequences = [
        np.concatenate([t.context, t.tokens[:n]]).astype(np.int64) for t, n in zip(turns, counts, strict=True)
    ]
    lengths = [len(sequence) - 1 for sequence in sequences]
    passed = torch.from_numpy(np.concatenate([sequence[:-1] for sequence in sequences]))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        logprobs = model.logits(model(passed, positions, PackedContext(lengths))).log_softmax(-1)
    ends = np.cumsum(lengths)
    found = [
        logprobs[end - n : end].gather(1, torch.from_numpy(t.tokens[:n].astype(np.int64))[:, None])[:, 0].numpy()
        for t, n, end in zip(turns, counts, ends, strict=True)
    ]
    recorded = [t.logprobs[:n] for t, n in zip(turns, counts, strict=True)]
    return np.abs(np.concatenate(found) - np.concatenate(recorded))


def before_the_first_swap(turn: Turn) -> int:
    """A token's pass is over the position before it."""
    if len(turn.lineage) == 1:
        return len(turn.tokens)
    return turn.lineage[1].position - len(turn.context) + 1
