"""Tests that are coroutines, without a plugin."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

DEADLINE_S = 60.0


def on_loop(
    runner: Callable[[dict[str, Any]], Callable[[Coroutine[Any, Any, None]], Any]] = lambda fixtures: asyncio.run,
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make a test of a coroutine function. `runner` chooses, from the test's fixtures, what runs it.

    The test fails when it has not ended within DEADLINE_S.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            async def limited() -> None:
                async with asyncio.timeout(DEADLINE_S):
                    await test(*args, **fixtures)

            runner(fixtures)(limited())

        return run

    return decorate


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition; the test's own deadline ends the wait."""
    while not await condition():
        await asyncio.sleep(0.005)
