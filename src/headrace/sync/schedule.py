"""When and in which order a version's stages run. The stages themselves belong to trainer and engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from headrace.engine.base import Engine
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError, SyncError
from headrace.sync.base import Manifest
from headrace.sync.config import SyncConfig


@dataclass(frozen=True)
class Published:
    """A version that every engine acknowledged."""

    number: int
    seconds: float
    """From the announcement to the last acknowledgement."""
    pause_s: float
    """The longest pause of an engine between two forward passes."""


class Publisher:
    """Takes a staged version to engines. One publication at a time.

    Every stage has the deadline of the configuration. A failure raises SyncError with the stage and the engine;
    that engine, and any other not yet swapped, goes on serving its old version.
    """

    def __init__(self, config: SyncConfig):
        self._config = config

    async def publish(self, manifest: Manifest, engines: Sequence[Engine]) -> Published:
        clock = asyncio.get_running_loop().time
        begun = clock()
        async with self._standstill(engines):
            number = manifest.version.number
            await self._each(engines, "announce", lambda engine: engine.announce(manifest))
            await self._each(engines, "transfer", lambda engine: engine.transfer(number))
            await self._each(engines, "verify", lambda engine: engine.verify(number))
            interrupt = self._config.interrupt
            reports = await self._each(engines, "swap", lambda engine: engine.swap(number, interrupt))
        seconds = clock() - begun
        pause = seconds if self._config.schedule == "blocking" else max(r.pause_s for r in reports)
        return Published(number=number, seconds=seconds, pause_s=pause)

    @asynccontextmanager
    async def _standstill(self, engines: Sequence[Engine]) -> AsyncIterator[None]:
        """What happens to generation meanwhile: nothing, or it stands still."""
        if self._config.schedule == "never_stop":
            yield
            return
        await self._each(engines, "announce", lambda engine: engine.pause())
        try:
            yield
        finally:
            await asyncio.gather(*(engine.resume() for engine in engines))

    async def _each(
        self, engines: Sequence[Engine], stage: str, act: Callable[[Engine], Awaitable[Any]]
    ) -> list[Any]:
        """All of them, or none goes on once one has failed."""
        tasks = [asyncio.ensure_future(self._stage(engine, stage, act(engine))) for engine in engines]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stage(self, engine: Engine, stage: str, action: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await action
        except TimeoutError:
            look_at = f"the sync.deadline_s setting, and what {engine.name} is doing"
            raise DeadlineExceeded(
                "publication", f"{engine.name} to {stage}", self._config.deadline_s, look_at
            ) from None
        except (SyncError, ComponentDied):
            raise
        except HeadraceError as error:
            raise SyncError(stage, engine.name, str(error)) from error
