"""Deadlines that stand still together, while what everybody waits for is known to be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Clocks:
    """The deadlines of many waits, `seconds` each. Time during which they are held does not count."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._held = False
        self._left: dict[asyncio.Timeout, float] = {}
        """Of each wait, what was left of its time when the clocks were held last."""

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Raises TimeoutError where what is within takes longer."""
        async with asyncio.timeout(None if self._held else self.seconds) as timeout:
            self._left[timeout] = self.seconds
            try:
                yield
            finally:
                del self._left[timeout]

    def hold(self, held: bool) -> None:
        if held == self._held:
            return
        self._held = held
        now = asyncio.get_running_loop().time()
        for timeout, left in self._left.items():
            if timeout.expired():
                continue
            end = timeout.when()
            if end is None:
                timeout.reschedule(now + left)
            else:
                self._left[timeout] = end - now
                timeout.reschedule(None)
