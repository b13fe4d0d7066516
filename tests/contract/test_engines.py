"""The engine's contract, for the native engine in a process of its own and for the fake in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest
from native_process import VOCAB, native_process

from headrace.errors import ComponentDied
from headrace.simulator.engine import SimEngine
from headrace.simulator.loop import VirtualLoop
from headrace.simulator.world import SimTrainer
from headrace.testing.engine import EngineContract
from headrace.testing.fakes import fake_pair, staged
from headrace.testing.serving import Serving, request


class TestFakeEngine(EngineContract):
    @pytest.fixture
    def serving(self) -> Iterator[Serving]:
        async def make() -> tuple[SimEngine, SimTrainer]:
            return fake_pair()

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            engine, trainer = runner.run(make())
            yield Serving(
                engine=engine, run=runner.run, stage=partial(staged, trainer), vocab_size=1, long_tokens=1000
            )


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with asyncio.Runner() as runner:
        opened = native_process(tmp_path_factory.mktemp("engine"), max_running=128)
        process = runner.run(opened.__aenter__())
        yield Serving(
            engine=process.engine, run=runner.run, stage=process.stage, vocab_size=VOCAB, long_tokens=1000
        )
        runner.run(opened.__aexit__(None, None, None))


class TestNativeEngineInAProcess(EngineContract):
    @pytest.fixture
    def serving(self, native: Serving) -> Serving:
        return native


def test_a_native_engine_that_dies_fails_every_call_also_those_that_wait(tmp_path):
    async def scenario() -> None:
        async with native_process(tmp_path) as process:
            engine = process.engine
            waiting = [asyncio.create_task(engine.sample(request([1, 2], 1500))) for _ in range(3)]
            while (await engine.usage()).running < 3:
                await asyncio.sleep(0.005)
            engine.peer.process.kill()
            for task in waiting:
                with pytest.raises(ComponentDied, match="engine-0 ended unexpectedly: killed by signal 9"):
                    await task
            for call in (engine.sample(request([1], 1)), engine.usage(), engine.pause(), engine.transfer(1)):
                with pytest.raises(ComponentDied, match="killed by signal 9"):
                    await call

    asyncio.run(asyncio.wait_for(scenario(), 60))
