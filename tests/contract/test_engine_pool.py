"""Several engines as one, over fakes in virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.engine.base import Interrupt, ScoreRequest
from headrace.engine.pool import EnginePool
from headrace.errors import EpisodeFailure
from headrace.records import WeightVersion
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import run_virtual
from headrace.simulator.world import SimTrainer
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher
from headrace.testing.fakes import fake_pair, staged
from headrace.testing.serving import request


def members(count: int = 2) -> tuple[list[SimEngine], SimTrainer, EnginePool]:
    pairs = [fake_pair(token_s=0.01, name=f"engine-{i}") for i in range(count)]
    engines = [engine for engine, _ in pairs]
    return engines, pairs[0][1], EnginePool(engines)


async def publish(engines: list[SimEngine], trainer: SimTrainer, number: int, interrupt: Interrupt) -> None:
    offer = await staged(trainer, WeightVersion(number=number, parent=number - 1, step=number))
    published = await Publisher(SyncConfig(interrupt=interrupt)).publish(*offer, engines)
    assert not published.failed


def test_a_turn_that_swaps_interrupt_comes_back_whole_with_a_lineage_that_says_so():
    async def main() -> None:
        engines, trainer, pool = members()
        await publish(engines, trainer, 1, "keep")
        task = asyncio.create_task(pool.sample(request([1, 2, 3], 100, seed=4)))
        for number in (2, 3):
            await asyncio.sleep(0.3)
            await publish(engines, trainer, number, "resume")
        turn = await task
        assert (turn.stop, len(turn.tokens), turn.seed) == ("length", 100, 4)
        assert turn.context.tolist() == [1, 2, 3]
        changes = (np.flatnonzero(np.diff(turn.versions)) + 1).tolist()
        assert turn.versions[[0, *changes]].tolist() == [1, 2, 3]
        assert [(e.position, e.version, e.before, e.cause) for e in turn.lineage] == [
            (0, 1, "kept", "start"),
            (2 + changes[0], 2, "recomputed", "resume"),
            (2 + changes[1], 3, "recomputed", "resume"),
        ]
        assert (await pool.usage()).tokens == 100
        assert [engine.load for engine in engines] == [0, 0]

    run_virtual(main())


def test_an_interrupted_fork_goes_on_from_its_own_tokens():
    async def main() -> None:
        engines, trainer, pool = members()
        await publish(engines, trainer, 1, "keep")
        source = request([1, 2, 3], 20, hold=True)
        whole = await pool.sample(source)
        task = asyncio.create_task(pool.sample(request([7], 50, fork_of=source.id, fork_at=10)))
        await asyncio.sleep(0.2)
        await publish(engines, trainer, 2, "resume")
        turn = await task
        assert turn.context.tolist() == [1, 2, 3, *whole.tokens[:7].tolist(), 7]
        assert (turn.stop, len(turn.tokens)) == ("length", 50)
        assert set(turn.versions.tolist()) == {1, 2}

    run_virtual(main())


@pytest.mark.parametrize("interrupt", ["keep", "resume"])
def test_a_cut_returns_at_once_also_where_swaps_interrupt(interrupt: Interrupt):
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        engines, trainer, pool = members()
        await publish(engines, trainer, 1, "keep")
        asked = request([1, 2], 1000)
        task = asyncio.create_task(pool.sample(asked))
        await asyncio.sleep(0.5)
        await publish(engines, trainer, 2, interrupt)
        await asyncio.sleep(0.5)
        begun = clock()
        pool.cut(asked.id)
        turn = await task
        assert clock() == begun
        assert turn.stop == "cancelled"
        assert 95 <= len(turn.tokens) < 200
        assert set(turn.versions.tolist()) == {1, 2}
        assert (await pool.sample(request([1], 3, id=asked.id))).stop == "length"

    run_virtual(main())


def test_a_cut_at_the_moment_of_the_swap_is_not_resumed():
    async def main() -> None:
        engines, trainer, pool = members(1)
        await publish(engines, trainer, 1, "keep")
        manifest, seal = await staged(trainer, WeightVersion(number=2, parent=1, step=2))
        for stage in (engines[0].announce(manifest), engines[0].transfer(2), engines[0].verify(seal)):
            await stage
        asked = request([1, 2], 1000)
        task = asyncio.create_task(pool.sample(asked))
        await asyncio.sleep(0.2)
        swap = asyncio.create_task(engines[0].swap(2, "resume"))
        await asyncio.sleep(0)
        pool.cut(asked.id)
        turn = await task
        assert turn.stop == "cancelled"
        assert set(turn.versions.tolist()) == {1}
        await swap
        assert engines[0].load == 0

    run_virtual(main())


def test_forks_go_where_their_source_is_served_or_held_until_it_is_released():
    async def main() -> None:
        engines, trainer, pool = members(3)
        await publish(engines, trainer, 1, "keep")
        sources = [request([i, 2, 3], 30, hold=True) for i in range(9)]
        tasks = [asyncio.create_task(pool.sample(one)) for one in sources]
        await asyncio.sleep(0.1)
        running = [await pool.sample(request([], 5, fork_of=one.id, fork_at=4)) for one in sources]
        turns = await asyncio.gather(*tasks)
        assert len({turn.engine for turn in turns}) > 1
        held = [await pool.sample(request([], 5, fork_of=one.id, fork_at=9)) for one in sources]
        for i, turn in enumerate(turns):
            assert running[i].engine == held[i].engine == turn.engine
            assert held[i].context.tolist() == [i, 2, 3, *turn.tokens[:6].tolist()]
            pool.release(sources[i].id)
            with pytest.raises(EpisodeFailure):
                await pool.sample(request([], 5, fork_of=sources[i].id, fork_at=4))

    run_virtual(main())


def test_scores_come_from_the_engine_with_the_least_to_do():
    async def main() -> None:
        engines, trainer, pool = members(2)
        await publish(engines, trainer, 1, "keep")
        busy = [asyncio.create_task(engines[0].sample(request([1], 50))) for _ in range(3)]
        await asyncio.sleep(0.1)
        asked = ScoreRequest(id=9, context=np.array([1, 2], np.int32), tokens=np.array([0, 0], np.int32))
        scored = await pool.score(asked)
        assert (scored.engine, scored.versions.tolist()) == ("engine-1", [1, 1])
        await asyncio.gather(*busy)

    run_virtual(main())
