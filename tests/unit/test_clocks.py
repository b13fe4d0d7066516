"""Deadlines that stand still together, in virtual time."""

from __future__ import annotations

import asyncio

from headrace.clocks import Clocks
from headrace.simulator.loop import run_virtual


async def ends_at(clocks: Clocks, begins: float) -> float:
    await asyncio.sleep(begins)
    try:
        async with clocks.deadline():
            await asyncio.sleep(1e6)
    except TimeoutError:
        pass
    return asyncio.get_running_loop().time()


def test_time_during_which_clocks_are_held_does_not_count_for_waits_before_within_and_after():
    async def main() -> None:
        clocks = Clocks(10.0)
        waits = [asyncio.create_task(ends_at(clocks, begins)) for begins in (0.0, 6.0, 50.0, 200.0)]
        await asyncio.sleep(8.0)
        clocks.hold(True)
        clocks.hold(True)
        await asyncio.sleep(92.0)
        clocks.hold(False)
        assert await asyncio.gather(*waits) == [102.0, 108.0, 110.0, 210.0]

    run_virtual(main())


def test_what_ends_in_time_is_let_go_of():
    async def main() -> None:
        clocks = Clocks(10.0)
        async with clocks.deadline():
            await asyncio.sleep(9.0)
        clocks.hold(True)
        clocks.hold(False)
        await asyncio.sleep(20.0)
        assert await ends_at(clocks, 0.0) == 39.0

    run_virtual(main())


def test_a_deadline_that_has_just_passed_is_not_taken_back():
    async def main() -> None:
        clocks = Clocks(10.0)
        wait = asyncio.create_task(ends_at(clocks, 0.0))
        await asyncio.sleep(1.0)
        asyncio.get_running_loop().call_at(10.0, clocks.hold, True)
        assert await wait == 10.0

    run_virtual(main())
