"""The controller's client of an engine's process, where the process is a fake."""

from __future__ import annotations

import asyncio

from headrace.engine.pool import EnginePool
from headrace.engine.remote import RemoteEngine
from headrace.errors import ComponentDied
from headrace.ipc import Peer
from headrace.records import WeightVersion
from headrace.simulator.loop import run_virtual
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher
from headrace.testing.fakes import fake_pair, staged
from headrace.testing.serving import request


class NoProcess:
    pid = 0

    def poll(self) -> int | None:
        return None

    def kill(self) -> None: ...

    async def wait(self, seconds: float) -> int | None:
        return None


def test_a_request_that_comes_at_the_moment_of_an_engines_death_goes_to_another():
    async def main() -> None:
        peer = Peer("engine-0", NoProcess())
        dying = RemoteEngine(peer, deadline_s=1.0, close_s=1.0)
        dying._version = 1
        other, trainer = fake_pair(name="engine-1")
        offer = await staged(trainer, WeightVersion(number=1, parent=0, step=1))
        await Publisher(SyncConfig()).publish(*offer, [other])
        pool = EnginePool([dying, other])
        assert pool.version == 1
        # Nobody has been told of it yet: callbacks run at the loop's next turn.
        peer.died.set_result(ComponentDied("engine-0", "killed by signal 9"))
        assert dying.version == -1
        turns = [await asyncio.wait_for(pool.sample(request([n], 3)), 5.0) for n in range(8)]
        assert {turn.engine for turn in turns} == {"engine-1"}

    run_virtual(main())


def test_only_a_death_that_nobody_wanted_is_reported():
    async def main() -> None:
        reported: list[str] = []
        for name, killed in (("engine-0", False), ("engine-1", True)):
            peer = Peer(name, NoProcess())
            RemoteEngine(peer, deadline_s=1.0, close_s=1.0, on_death=lambda engine: reported.append(engine.name))
            if killed:
                await peer.kill()
            peer.died.set_result(ComponentDied(name, "killed by signal 9"))
            await asyncio.sleep(0.01)
        assert reported == ["engine-0"]

    run_virtual(main())
