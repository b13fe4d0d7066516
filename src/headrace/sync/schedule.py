"""When and in which order a version's stages run. The stages themselves belong to trainer and engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.base import Engine, SwapReport
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError, SyncError
from headrace.sync.base import Manifest, Seal
from headrace.sync.config import SyncConfig


@dataclass(frozen=True)
class Published:
    """What became of a version."""

    number: int
    seconds: float
    """From the announcement to the last acknowledgement."""
    pause_s: float
    """The longest pause of an engine between two forward passes."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage, at the engine that took longest."""
    failed: dict[str, HeadraceError] = field(default_factory=dict)
    """By name, the engines that did not acknowledge it, and why. They serve the version they had, or are dead."""


class Publisher:
    """Takes a staged version to engines, each at its own pace: what fails at one does not concern another.

    Every stage has the deadline of the configuration.
    """

    def __init__(self, config: SyncConfig):
        self._config = config
        self._resuming: set[asyncio.Future[None]] = set()
        """Beside the publication that failed."""

    async def publish(
        self, manifest: Manifest, seal: Seal | Awaitable[Seal], engines: Sequence[Engine]
    ) -> Published:
        """`seal` comes when the trainer has copied all of the version. Where it fails, so does every engine."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        sealed = asyncio.ensure_future(_awaited(seal))
        # Engines that fail before they need it do not ask what became of it.
        sealed.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        stages: dict[str, float] = {}
        outcomes = await asyncio.gather(
            *(self._one(manifest, sealed, engine, stages) for engine in engines), return_exceptions=True
        )
        failed: dict[str, HeadraceError] = {}
        pauses = [0.0]
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, HeadraceError):
                failed[engine.name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                pauses.append(outcome)
        return Published(
            number=manifest.version.number,
            seconds=clock() - begun,
            pause_s=max(pauses),
            stages=stages,
            failed=failed,
        )

    async def _one(
        self, manifest: Manifest, seal: asyncio.Future[Seal], engine: Engine, stages: dict[str, float]
    ) -> float:
        """All stages at one engine; returns its pause."""
        number, interrupt = manifest.version.number, self._config.interrupt
        clock = asyncio.get_running_loop().time
        begun = clock()
        async with self._standstill(engine):
            since = clock()

            async def stage(name: str, action: Awaitable[Any]) -> Any:
                nonlocal since
                outcome = await self._stage(engine, name, action)
                stages[name], since = max(stages.get(name, 0.0), clock() - since), clock()
                return outcome

            await stage("announce", engine.announce(manifest))
            await stage("transfer", engine.transfer(number))
            checksums = await stage("seal", asyncio.shield(seal))
            await stage("verify", engine.verify(checksums))
            report: SwapReport = await stage("swap", engine.swap(number, interrupt))
        return clock() - begun if self._config.schedule == "blocking" else report.pause_s

    @asynccontextmanager
    async def _standstill(self, engine: Engine) -> AsyncIterator[None]:
        """What happens to generation meanwhile: nothing, or it stands still."""
        if self._config.schedule == "never_stop":
            yield
            return
        try:
            # One that was told to stand still may do so although nobody heard it say so.
            await self._stage(engine, "announce", engine.pause())
            yield
        except BaseException as error:
            # All are told. Only who answered is waited for: who did not in time would have as much time again.
            resuming = asyncio.ensure_future(engine.resume())
            self._resuming.add(resuming)
            resuming.add_done_callback(self._resumed)
            if isinstance(error, SyncError):
                await asyncio.shield(resuming)
            raise
        else:
            await self._stage(engine, "acknowledge", engine.resume())

    def _resumed(self, done: asyncio.Future[None]) -> None:
        self._resuming.discard(done)
        if not done.cancelled():
            done.exception()

    async def _stage(self, engine: Engine, stage: str, action: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await action
        except TimeoutError:
            look_at = f"the sync.deadline_s setting, and what {engine.name} is doing"
            raise DeadlineExceeded(
                "publication", f"{engine.name} to {stage}", self._config.deadline_s, look_at
            ) from None
        except (SyncError, ComponentDied, DeadlineExceeded):
            raise
        except HeadraceError as error:
            raise SyncError(stage, engine.name, str(error)) from error


async def _awaited(seal: Seal | Awaitable[Seal]) -> Seal:
    return seal if isinstance(seal, Seal) else await seal
