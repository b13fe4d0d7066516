"""publish: versions → engines, beside training. A failure leaves engines on the version they had, and is healed.

produced ──▶ newest ──▶ stage at the trainer ──▶ announce … swap at each engine ──▶ served
              ▲                │ no room: again         │ an engine that failed: once more, whole;
              │                ▼                        │ one that is dead, stuck or fails again: replaced first
              └── a version that was not begun, or of ◀─┘
                  which the trainer has no sound copy any more, gives way to a later one
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engine.base import Engine
from headrace.errors import ComponentDied, DeadlineExceeded, HeadraceError, LawBroken, Superseded, SyncError
from headrace.ledger import Journal
from headrace.records import WeightVersion
from headrace.sync import version_digest
from headrace.sync.base import Destination, Manifest, Seal
from headrace.sync.config import SyncConfig
from headrace.sync.plan import some
from headrace.sync.schedule import Published, Publisher
from headrace.telemetry.base import Telemetry
from headrace.training.base import Trainer


class Members(Protocol):
    """The rollout engines."""

    members: list[Any]


@dataclass
class PublicationParts:
    """What publication uses."""

    trainer: Trainer
    publisher: Publisher
    engines: Members
    journal: Journal
    telemetry: Telemetry
    served: Callable[[], None]
    """Called when a rollout engine serves another version than before."""
    replace: Callable[[Engine], Awaitable[None]] | None = None
    """Give an engine that is dead or stuck a new process, without weights yet. None: its failure ends the run."""


@dataclass(frozen=True)
class _Offer:
    """A version on offer. Its seal comes when the trainer has copied all of it."""

    manifest: Manifest
    seal: asyncio.Future[Seal]

    @property
    def sealed(self) -> bool:
        """Whether the trainer has done its part."""
        return self.seal.done() and not self.seal.cancelled() and self.seal.exception() is None


class Publication:
    """One publication at a time."""

    def __init__(self, config: SyncConfig, parts: PublicationParts):
        self._config = config
        self._parts = parts
        self._newest: WeightVersion | None = None
        self._staged: WeightVersion | None = None
        self._news = asyncio.Event()
        self._due = asyncio.Event()
        self._sending = asyncio.Lock()
        self._next_at = 0.0
        self.last = Published(number=0, seconds=0.0, pause_s=0.0)
        self.version_bytes = 0

    def produced(self, version: WeightVersion, *, due: bool) -> None:
        """The trainer has this version now. With `due` it, or a later one, goes to the rollout engines."""
        self._newest = version
        self._news.set()
        if due:
            self._due.set()

    async def run(self) -> None:
        """Publish what is due, the newest version whenever one can begin."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._due.wait()
            await asyncio.sleep(max(0.0, self._next_at - clock()))
            version = await self._newer_than(None)
            self._due.clear()
            self._next_at = clock() + self._config.min_interval_s
            try:
                await self._insist(version, self._parts.engines.members)
            except Superseded:
                # The trainer went on. It will say so, and that version is due then.
                await self._newer_than(version)
                self._due.set()

    async def _newer_than(self, version: WeightVersion | None) -> WeightVersion:
        while self._newest is None or self._newest is version:
            self._news.clear()
            await self._news.wait()
        return self._newest

    async def begin(self, version: WeightVersion, engines: Sequence[Engine]) -> asyncio.Task[None]:
        """Publish this very version; returns once the trainer's weights are copied and may change."""
        packed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._insist(version, engines, packed))
        await asyncio.wait({packed, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task

    async def revive(self, engine: Engine) -> None:
        """An engine died while it generated: replace its process and give it the weights that were staged last."""
        async with self._sending:
            if engine.version >= 0 or self._staged is None:
                return  # a publication met its death before and has healed it, or none has begun
            error = ComponentDied(engine.name, "it died while it generated")
            self._parts.telemetry.event("engine_died", engine=engine.name)
            await self._replaced(engine, error)
            await self._equip(engine, self._staged)

    async def equip(self, engine: Engine) -> None:
        """An engine's process was replaced: give it the weights that were staged last."""
        async with self._sending:
            if engine.version < 0 and self._staged is not None:
                await self._equip(engine, self._staged)

    async def _equip(self, engine: Engine, version: WeightVersion) -> None:
        try:
            offer = await self._again(version, [engine])
            _, offer = await self._until_all_have_it(offer, [engine])
        except (Superseded, _NotOffered):
            # It has no weights until the version that the trainer has now goes to all.
            self._due.set()
            return
        if self._config.check_served:
            await self._check_served(offer, [engine])

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Within it no version is on its way to an engine: what was has arrived, and nothing else begins."""
        async with self._sending:
            yield

    async def _insist(
        self, version: WeightVersion, engines: Sequence[Engine], packed: asyncio.Future[None] | None = None
    ) -> None:
        """Publish; when the trainer could not offer the version, on a full disk say, try again after a while."""
        for attempt in itertools.count():
            try:
                return await self._publish(version, engines, packed)
            except _NotOffered as failure:
                if attempt == self._config.retries:
                    raise failure.error from None
                self._failed(version, "trainer", failure.error)
                await asyncio.sleep(min(2.0**attempt, self._config.deadline_s))

    async def _publish(
        self, version: WeightVersion, engines: Sequence[Engine], packed: asyncio.Future[None] | None
    ) -> None:
        """To those that do not have it yet."""
        parts = self._parts
        async with self._sending:
            waiting = [engine for engine in engines if engine.version != version.number]
            if not waiting:
                return
            # Before an engine can sample under a version, the ledger knows it.
            await parts.journal.flush()
            offer = await self._stage(version, waiting)
            self._staged, self.version_bytes = version, offer.manifest.nbytes
            if packed is not None:
                offer.seal.add_done_callback(lambda seal: _tell(packed, seal))
            try:
                published, offer = await self._until_all_have_it(offer, waiting)
            except Superseded:
                await self._tell_in_part(offer, waiting)
                raise
            if any(engine in parts.engines.members for engine in waiting):
                self.last = published
            checked = await self._check_served(offer, waiting) if self._config.check_served else {}
            parts.telemetry.event(
                "published",
                version=version.number,
                step=version.step,
                seconds=published.seconds,
                pause_s=published.pause_s,
                stages={name: round(spent, 6) for name, spent in published.stages.items()},
                bytes=sum(stream.nbytes for stream in offer.manifest.streams[-1:]),
                engines=[engine.name for engine in waiting],
                checksum=_digest(offer.manifest, await offer.seal),
                **checked,
            )

    async def _tell_in_part(self, offer: _Offer, engines: Sequence[Engine]) -> None:
        """Where a later version takes this one's place, tokens may have been sampled under it all the same."""
        version = offer.manifest.version
        took = [engine.name for engine in engines if engine.version == version.number]
        if took and offer.sealed:
            checksum = _digest(offer.manifest, await offer.seal)
            what = {"version": version.number, "step": version.step, "engines": took, "checksum": checksum}
            self._parts.telemetry.event("published_in_part", **what)

    async def _check_served(self, offer: _Offer, engines: Sequence[Engine]) -> dict[str, dict[str, int]]:
        """Ask engines that have acknowledged a version what they serve. LawBroken where it is anything else; what
        they said, for the record."""
        manifest, seal = offer.manifest, await offer.seal
        adapter = None if manifest.adapter is None else manifest.adapter.name
        served: dict[str, int] = {}
        for engine in engines:
            try:
                found = await engine.fingerprint(adapter)
            except ComponentDied:
                continue  # whoever watches over it gives it the weights again
            if found.number != seal.number:
                what = f"version {seal.number} was acknowledged, and version {found.number} is served"
                raise LawBroken("atomic swap", engine.name, what)
            pairs = zip(manifest.tensors, seal.checksums, found.checksums, strict=True)
            if wrong := [spec.name for spec, sent, has in pairs if sent != has]:
                what = f"version {seal.number} was acknowledged, and other bytes are served for {some(wrong)}"
                raise LawBroken("atomic swap", engine.name, what)
            served[engine.name] = _digest(manifest, found)
        return {"served": served}

    async def _until_all_have_it(self, offer: _Offer, engines: Sequence[Engine]) -> tuple[Published, _Offer]:
        """Publish, and heal what fails, up to `sync.retries` times. Returns the offer that succeeded."""
        version = offer.manifest.version
        published = await self._taken(offer, engines)
        attempt, left = 0, list(engines)
        while published.failed:
            left = [engine for engine in left if engine.name in published.failed]
            for name, error in published.failed.items():
                self._failed(version, name, error)
            if attempt == self._config.retries:
                raise next(iter(published.failed.values()))
            for engine in left:
                error = published.failed[engine.name]
                at_fault = offer.sealed and (attempt > 0 or self._is_stuck(engine, error))
                if _died(engine, error) or at_fault:
                    await self._replaced(engine, error)
            attempt += 1
            offer = await self._again(version, left)
            again = await self._taken(offer, left)
            published = Published(
                number=version.number,
                seconds=published.seconds + again.seconds,
                pause_s=max(published.pause_s, again.pause_s),
                stages=again.stages,
                failed=again.failed,
            )
        return published, offer

    async def _taken(self, offer: _Offer, engines: Sequence[Engine]) -> Published:
        """Once. Raises where the trainer has died, which no other engine would help against."""
        try:
            published = await self._parts.publisher.publish(offer.manifest, offer.seal, engines)
        except BaseException:
            offer.seal.cancel()
            raise
        self._parts.served()
        for engine in engines:
            error = published.failed.get(engine.name)
            if isinstance(error, ComponentDied) and not _died(engine, error):
                raise error
        return published

    def _is_stuck(self, engine: Engine, error: HeadraceError) -> bool:
        """It gave no answer, not even that it waited too long itself. One that drains may yet."""
        answered = not isinstance(error, DeadlineExceeded) or error.args[0] == engine.name
        return not answered and self._config.interrupt != "drain"

    def _failed(self, version: WeightVersion, who: str, error: HeadraceError) -> None:
        self._parts.telemetry.event("sync_failed", version=version.number, who=who, why=str(error))

    async def _replaced(self, engine: Engine, error: HeadraceError) -> None:
        if self._parts.replace is None:
            raise error
        await self._parts.replace(engine)

    async def _stage(self, version: WeightVersion, engines: Sequence[Engine]) -> _Offer:
        """Put the version on offer, from the trainer's weights."""
        trainer = self._parts.trainer
        try:
            manifest = await trainer.stage(version, _destinations(engines))
        except Superseded:
            raise
        except SyncError as error:
            raise _NotOffered(error) from error
        seal = asyncio.ensure_future(trainer.seal(version.number))
        seal.add_done_callback(_noted)
        return _Offer(manifest, seal)

    async def _again(self, version: WeightVersion, engines: Sequence[Engine]) -> _Offer:
        """The copy that was offered, whole; from the trainer's weights where that copy is not to be had."""
        try:
            manifest, seal = await self._parts.trainer.restage(version.number, _destinations(engines))
        except SyncError:
            return await self._stage(version, engines)
        sealed: asyncio.Future[Seal] = asyncio.get_running_loop().create_future()
        sealed.set_result(seal)
        return _Offer(manifest, sealed)


class _NotOffered(Exception):
    """The trainer could not offer a version. What engines have is untouched."""

    def __init__(self, error: SyncError):
        super().__init__(error)
        self.error = error


def _died(engine: Engine, error: HeadraceError) -> bool:
    return isinstance(error, ComponentDied) and error.who == engine.name


def _noted(seal: asyncio.Future[Seal]) -> None:
    """Engines that fail first do not ask what became of it."""
    if not seal.cancelled():
        seal.exception()


def _tell(packed: asyncio.Future[None], seal: asyncio.Future[Seal]) -> None:
    """The trainer's weights are copied, unless they could not be."""
    if not packed.done() and not seal.cancelled() and seal.exception() is None:
        packed.set_result(None)


def _destinations(engines: Sequence[Engine]) -> list[Destination]:
    return [Destination(name=engine.name, version=engine.version) for engine in engines]


def _digest(manifest: Manifest, seal: Seal) -> int:
    return version_digest(dict(zip((spec.name for spec in manifest.tensors), seal.checksums, strict=True)))
