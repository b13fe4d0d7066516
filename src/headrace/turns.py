"""Engines and trainer take turns with one machine's memory: `placement = "turns"`.

a batch is there ─▶ what is on its way to engines arrives ─▶ they sleep ─▶ train ─▶ publish, if due ─▶ they wake
                                                             └── nobody is given ──┘
                                                                  a version, or revived

Requests wait while their engine sleeps. An engine that dies then is replaced as ever, but after the training step:
the new process would take the memory that the trainer has its turn with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.config.run import RunConfig
from headrace.engine.base import Engine
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError
from headrace.publication import Members, Publication
from headrace.rollout.base import Rollouts
from headrace.telemetry.base import Telemetry


@dataclass
class TurnsParts:
    """What taking turns uses."""

    publication: Publication
    engines: Members
    rollouts: Rollouts
    telemetry: Telemetry
    evaluator: Engine | None = None
    replace: Callable[[Engine], Awaitable[None]] | None = None
    """Give an engine that is dead or stuck a new process, without weights yet. None: its failure ends the run."""


class Turns:
    """First `trainers_turn`, then `engines_turn`, and so on."""

    def __init__(self, config: RunConfig, parts: TurnsParts):
        self._parts = parts
        self._deadline_s = config.sync.deadline_s
        # A delta changes weights that are there, and an adapter is applied to them: neither could go without.
        self._comes_whole = config.payload == "full"
        self._without_weights: list[Engine] = []
        """In a new process since the last turn of the engines."""
        self._slept: dict[str, bool] = {}
        """Whether its weights were kept, by the name of each engine that was put to sleep."""
        self._sleep_s = self._asleep_at = 0.0

    @asynccontextmanager
    async def trainers_turn(self, *, outdated: bool, evaluating: bool) -> AsyncIterator[None]:
        """All engines sleep within. `outdated`: those for rollouts get a new version before they wake, or do not
        wake again. `evaluating`: the evaluator is to go on with the version it has."""
        parts, clock = self._parts, asyncio.get_running_loop().time
        # Sleep forgets a version on its way.
        async with parts.publication.at_rest():
            begun = clock()
            parts.rollouts.hold_clocks(True)
            # What nobody will ask for again need not be copied to the host. The next version is sure to come where
            # it is due: engines wake when all have it, and a run in which one cannot get it ends.
            kept = not (outdated and self._comes_whole)
            sleepers = [(engine, kept) for engine in parts.engines.members]
            if parts.evaluator is not None:
                sleepers.append((parts.evaluator, evaluating or not self._comes_whole))
            self._slept = {}
            await asyncio.gather(*(self._put_to_sleep(engine, keep) for engine, keep in sleepers))
            self._asleep_at = clock()
            self._sleep_s = self._asleep_at - begun
            yield

    async def engines_turn(self, *, step: int, generating: bool, evaluating: bool) -> None:
        """After training and publication: wake whoever has something to do."""
        parts, clock = self._parts, asyncio.get_running_loop().time
        engines: list[Engine] = list(parts.engines.members) if generating else []
        if evaluating and parts.evaluator is not None:
            engines.append(parts.evaluator)
        # An engine that is being given a version, one that was revived say, refuses to wake meanwhile.
        async with parts.publication.at_rest():
            begun = clock()
            await asyncio.gather(*(self._wake(engine) for engine in engines))
        for engine in self._without_weights:
            if engine in engines:
                await parts.publication.equip(engine)
        self._without_weights.clear()
        parts.rollouts.hold_clocks(False)
        parts.telemetry.event(
            "slept",
            step=step,
            engines=sorted(self._slept),
            kept_weights=sorted(name for name, kept in self._slept.items() if kept),
            woken=[engine.name for engine in engines],
            sleep_s=self._sleep_s,
            asleep_s=begun - self._asleep_at,
            wake_s=clock() - begun,
        )

    async def _put_to_sleep(self, engine: Engine, keep_weights: bool) -> None:
        """Also an engine that serves nothing: its memory is wanted all the same."""
        failure = await self._tell_to_sleep(engine, keep_weights)
        if failure is not None:
            # It would keep its memory.
            await self._replace(engine, failure)
            if (again := await self._tell_to_sleep(engine, keep_weights)) is not None:
                raise again

    async def _tell_to_sleep(self, engine: Engine, keep_weights: bool) -> HeadraceError | None:
        """Why it does not sleep, though it lives."""
        try:
            await self._answered(engine, "sleep", engine.sleep(keep_weights))
        except ComponentDied as error:
            self._mourn(error)
        except HeadraceError as error:
            return error
        else:
            self._slept[engine.name] = keep_weights
        return None

    async def _wake(self, engine: Engine) -> None:
        try:
            await self._answered(engine, "wake", engine.wake())
        except ComponentDied as error:
            self._mourn(error)
        except DeadlineExceeded as error:
            await self._replace(engine, error)

    def _mourn(self, error: ComponentDied) -> None:
        """The dead hold no memory. The next publication replaces it, or whoever watches over it."""
        if self._parts.replace is None:
            raise error

    async def _replace(self, engine: Engine, error: HeadraceError) -> None:
        if self._parts.replace is None:
            raise error
        self._parts.telemetry.event("engine_stuck", engine=engine.name, why=str(error))
        await self._parts.replace(engine)
        self._without_weights.append(engine)

    async def _answered(self, engine: Engine, what: str, action: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await action
        except TimeoutError:
            look_at = f"the sync.deadline_s setting, and what {engine.name} is doing"
            whom = f"{engine.name} to {what}"
            raise DeadlineExceeded("the trainer's turn", whom, self._deadline_s, look_at) from None
