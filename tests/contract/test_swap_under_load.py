"""Law 4 where it is hardest: version after version arrives while a full batch of sequences runs on.

Every recorded log-prob is recomputed from the sequence's record alone. All tensors differ in all versions, so a
pass that saw a mix of two versions, or a token with the wrong version, gives other numbers.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from native_process import VOCAB, Published, fresh_model, native_process, version_of

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import Interrupt, SampleRequest
from headrace.engine.pool import EnginePool
from headrace.records import KvEvent, Turn, WeightVersion
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher

RUNNING = 64
REPLAYED = 220
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Answer:
    request: SampleRequest
    turn: Turn
    served: int
    """Acknowledged when the request was made."""
    staged: int
    """Staged, though perhaps not yet swapped, when it was answered."""


async def load_and_publish(process: Published, versions: int, interrupt: Interrupt) -> list[Answer]:
    """Keep RUNNING requests running until `versions` versions were published, then let them end."""
    ids, rng = itertools.count(), np.random.default_rng(0)
    answers: list[Answer] = []
    staged, publishing = 0, True

    async def keep_busy() -> None:
        while publishing:
            context = rng.integers(0, VOCAB, rng.integers(3, 12)).astype(np.int32)
            number = next(ids)
            request = SampleRequest(id=number, context=context, max_tokens=int(rng.integers(30, 90)), seed=number)
            served = process.engine.version
            turn = await pool.sample(request)
            answers.append(Answer(request, turn, served, staged))

    async def publish(number: int) -> None:
        nonlocal staged
        staged = number
        manifest, seal = await process.stage(WeightVersion(number=number, parent=number - 1, step=number))
        published = await publisher.publish(manifest, seal, [process.engine])
        assert not published.failed

    pool = EnginePool([process.engine])
    publisher = Publisher(SyncConfig(interrupt=interrupt, deadline_s=30.0))
    await publish(1)
    load = [asyncio.create_task(keep_busy()) for _ in range(RUNNING)]
    for number in range(2, versions + 1):
        while len(answers) < number * REPLAYED // versions - RUNNING:
            await asyncio.sleep(0.002)
        await publish(number)
    publishing = False
    await asyncio.gather(*load)
    return answers


@pytest.mark.parametrize(("interrupt", "versions"), [("keep", 200), ("recompute", 60), ("resume", 60)])
def test_no_token_is_lost_or_mislabelled_while_versions_are_swapped_under_load(
    tmp_path: Path, interrupt: Interrupt, versions: int
):
    for number in range(versions + 1):
        version_of(number)

    async def scenario() -> list[Answer]:
        async with native_process(tmp_path, max_running=RUNNING, max_context=128) as process:
            answers = await load_and_publish(process, versions, interrupt)
            usage = await process.engine.usage()
            assert (usage.running, usage.waiting) == (0, 0)
            assert usage.tokens == sum(answer.request.max_tokens for answer in answers)
            return answers

    answers = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert len(answers) >= REPLAYED
    seen: set[int] = set()
    for answer in answers:
        turn, used = answer.turn, answer.turn.versions
        assert (turn.stop, len(turn.tokens)) == ("length", answer.request.max_tokens)
        assert turn.context.tolist() == answer.request.context.tolist()
        assert (np.diff(used) >= 0).all()
        assert answer.served <= used[0]
        assert used[-1] <= answer.staged
        seen.update(used.tolist())
    assert len(seen) > versions / 2, "swaps come between passes, not between sequences"

    swapped = sorted(answers, key=lambda answer: -len(answer.turn.lineage))
    spread = [swapped[i] for i in np.linspace(0, len(swapped) - 1, REPLAYED).astype(int)]
    assert len(spread[REPLAYED // 2].turn.lineage) >= 3
    worst = max(
        float(np.abs(replay_logprobs(version_of, a.turn.context, a.turn) - a.turn.logprobs).max()) for a in spread
    )
    assert worst < TOLERANCE


def test_a_mix_of_two_versions_in_any_one_tensor_would_have_been_noticed():
    """Not of the engine: of the test above, whose numbers could otherwise agree for no reason."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).astype(np.int32)
    turn = Turn(
        tokens=tokens[8:],
        logprobs=np.zeros(32, np.float32),
        versions=np.ones(32, np.int32),
        context=tokens[:8],
        stop="length",
        lineage=(KvEvent(position=0, version=1, before="kept", cause="start"),),
    )
    whole = replay_logprobs(version_of, turn.context, turn)
    for name, other in version_of(2).named_parameters():
        mixed = fresh_model(1)
        mixed.get_parameter(name).copy_(other)
        moved = np.abs(replay_logprobs(lambda number, mixed=mixed: mixed, turn.context, turn) - whole).max()
        assert moved > 100 * TOLERANCE, name
