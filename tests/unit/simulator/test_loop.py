"""Virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.errors import LawBroken
from headrace.simulator.loop import run_virtual


def test_a_day_of_waiting_takes_no_time():
    async def wait():
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    begun = time.perf_counter()
    assert run_virtual(wait()) == pytest.approx(86_400)
    assert time.perf_counter() - begun < 60


def test_timers_fire_in_their_order():
    async def race():
        seen = []

        async def at(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(at(3), at(1), at(2))
        return seen

    assert [s for s, _ in run_virtual(race())] == [1, 2, 3]


def test_a_wait_that_nothing_can_end_is_an_error_and_not_a_hang():
    async def stuck():
        await asyncio.Event().wait()

    with pytest.raises(LawBroken, match="no silent wait"):
        run_virtual(stuck())
