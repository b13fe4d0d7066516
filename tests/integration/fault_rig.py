"""What fault trials are carried out on: a trainer's process and two engines' under load, and a real Publication."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fault_children as children
import numpy as np
from fault_children import Arm, AskTruth, TellTruth
from fault_processes import fork, forking
from fault_weights import ADAPTER, ADAPTER_ROOM, VOCAB, expected, save

from headrace.engine.base import Engine, SampleRequest
from headrace.engine.messages import EngineReady
from headrace.engine.pool import EnginePool
from headrace.engine.remote import RemoteEngine
from headrace.errors import ComponentDied, HeadraceError
from headrace.ipc import Peer
from headrace.orchestration.processes import ready
from headrace.publication import Publication, PublicationParts
from headrace.records import WeightVersion
from headrace.sync import open_channel
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Publisher
from headrace.training.remote import RemoteTrainer, TrainerReady

if TYPE_CHECKING:
    from fault_trials import Trial

DTYPE = "float32"
"""Published, and served on every device, where `auto` may mean another one."""
SLACK_S = 1.0
"""How late a busy machine may wake somebody whose deadline has passed."""


@dataclass(frozen=True)
class Pace:
    deadline_s: float
    start_s: float
    """For the start of a process, which on CUDA compiles kernels when nobody has before."""
    healed_s: float
    """A version is served everywhere within this, whatever happened: one wait up to its deadline, and the start of
    a process or the waits for room on a disk."""
    rehearsals: int
    """Versions under load before the first trial. Kernels are compiled when they are first used, some with the
    second version, which may take longer than a deadline."""


PACES = {
    "cpu": Pace(deadline_s=1.5, start_s=60.0, healed_s=11.5, rehearsals=0),
    "cuda": Pace(deadline_s=4.0, start_s=180.0, healed_s=64.0, rehearsals=2),
}


@dataclass
class Outcome:
    trial: Trial
    struck: bool
    healed_s: float
    """From when the version was due until every engine had acknowledged it, and the next if there was one."""
    longest_wait_s: float
    """Of the waits that have a deadline."""
    replaced: list[str]
    """Engines that got a new process, and the trainer."""
    failures: list[str]
    """What the run's events say of failed publications."""
    wrong: list[str] = field(default_factory=list)
    """What must not be."""

    @property
    def at_fault(self) -> set[str]:
        """Who may be replaced for it."""
        return {self.trial.at} if self.trial.fault.action in ("kill", "stop") else set()

    def line(self) -> str:
        row = asdict(self) | {"trial": str(self.trial)}
        return json.dumps(row)


class TimedPublisher(Publisher):
    """Notes how long each stage took, and kills the trainer when an engine is at the stage where it is to die."""

    def __init__(self, config: SyncConfig, rig: Rig):
        super().__init__(config)
        self._rig = rig

    async def _stage(self, engine: Engine, stage: str, action: Awaitable[Any]) -> Any:
        self._rig.at_stage(stage)
        begun = time.monotonic()
        try:
            outcome = await super()._stage(engine, stage, action)
        finally:
            self._rig.waits.append(time.monotonic() - begun)
        if stage == "swap":
            self._rig.at_stage("acknowledge")
        return outcome


class TimedTrainer(RemoteTrainer):
    waits: list[float]

    async def _publish(self, record: Any) -> Any:
        begun = time.monotonic()
        try:
            return await super()._publish(record)
        finally:
            self.waits.append(time.monotonic() - begun)


class NoJournal:
    async def flush(self) -> None: ...


class Events:
    """The telemetry's events."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def event(self, kind: str, **fields: Any) -> None:
        if kind != "published":
            self.failures.append(f"{kind} {fields}")


class Rig:
    """What a run has: processes, a pool, a publication, and requests that never end."""

    def __init__(self, transport: str, payload: str, folder: Path, *, device: str = "cpu", load: int = 3):
        self._transport = transport
        self._payload = payload
        self._folder = folder
        self._device = device
        self._pace = PACES[device]
        self._load = load
        self._context = forking()
        self._config = SyncConfig(deadline_s=self._pace.deadline_s)
        self._number = 0
        self._published: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._deaths: asyncio.Queue[Engine] = asyncio.Queue()
        self._served = asyncio.Event()
        self._kill_trainer_at: str | None = None
        self._events = Events()
        self.waits: list[float] = []
        self.replaced: list[str] = []
        self.wrong: list[str] = []
        self._answers = [0] * load

    async def __aenter__(self) -> Rig:
        self._folder.mkdir(parents=True, exist_ok=True)
        save(self._folder / "model")
        # Of a collective: a group that cannot be made is given up in time.
        options = {"timeout_s": self._pace.deadline_s, "bucket_bytes": children.BUCKET_BYTES}
        self._channel = open_channel(
            self._transport,
            folder=str(self._folder / "versions"),
            **(options if self._transport == "collective" else {}),
        )
        self.engines: list[RemoteEngine] = []
        for i in range(2):
            peer = await self._engine_process(f"engine-{i}")
            deadlines = {"deadline_s": self._pace.deadline_s, "close_s": 10.0}
            self.engines.append(RemoteEngine(peer, **deadlines, on_death=self._deaths.put_nowait))
            await ready(peer, EngineReady, self._pace.start_s)
        adapter = ADAPTER.name if self._payload == "adapter" else None
        self.pool = EnginePool(self.engines, adapter=adapter, revive_s=self._pace.healed_s + self._pace.start_s)
        await self._start_trainer()
        await self._healed(await self._train())
        self._tasks += [asyncio.create_task(self._sample(i)) for i in range(self._load)]
        self._tasks += [asyncio.create_task(self._look(engine)) for engine in self.engines]
        for _ in range(self._pace.rehearsals):
            await self._check_requests()
            await self._healed(await self._train())
        return self

    async def __aexit__(self, *_: object) -> None:
        ends = [*self._tasks, *self._publishing]
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await asyncio.gather(*(part.close() for part in (*self.engines, self.trainer)))
        if "descriptor" in self._channel:
            os.close(self._channel["descriptor"])

    # ── One trial ────────────────────────────────────────────────────────────────────────────────────────

    async def carry_out(self, trial: Trial) -> Outcome:
        self.waits.clear()
        self.replaced.clear()
        self.wrong.clear()
        self._events.failures.clear()
        self._parts.publisher = TimedPublisher(
            SyncConfig(deadline_s=self._pace.deadline_s, schedule=trial.schedule, interrupt=trial.interrupt),  # type: ignore[arg-type]
            self,
        )
        victim = {engine.name: engine for engine in (*self.engines,)}.get(trial.at, self.trainer).peer
        number = await self._train(due=False)
        struck_before = await self._arm(victim, trial)
        begun = time.monotonic()
        self._publication.produced(self._version(number), due=True)
        beside = [asyncio.create_task(self._train_on(trial))]
        if trial.fault.action == "stop":
            beside.append(asyncio.create_task(self._wake(victim, trial.pause * self._pace.deadline_s)))
        healed, struck = self._pace.healed_s, False
        try:
            async with asyncio.timeout(self._pace.healed_s):
                await self._healed(number)
                await beside[0]
                await self._healed(self._number)
                struck = await self._struck(victim, struck_before)
                if struck and trial.family == "sender killed" and "trainer" not in self.replaced:
                    # It died when everybody had what it sent. It is missed at the next version.
                    await self._healed(await self._go_on_with_another_trainer())
            healed = time.monotonic() - begun
        except TimeoutError:
            has = {engine.name: engine.version for engine in self.engines}
            self.wrong.append(f"version {number} was not served after {self._pace.healed_s} s: {has}")
        except HeadraceError as error:
            self.wrong.append(f"the run ended: {error}")
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await self._check_engines()
        await self._check_requests()
        longest = max(self.waits, default=0.0)
        if longest > self._pace.deadline_s + SLACK_S:
            self.wrong.append(f"somebody waited {longest:.2f} s, with a deadline of {self._pace.deadline_s} s")
        return Outcome(
            trial, struck, healed, longest, list(self.replaced), list(self._events.failures), list(self.wrong)
        )

    async def _arm(self, victim: Peer, trial: Trial) -> int:
        if trial.fault.point == "sent":
            self._kill_trainer_at = trial.stage
            return 0
        told = await victim.call(Arm(call=victim.next_call(), fault=trial.fault), deadline_s=self._pace.start_s)
        return told.struck

    async def _struck(self, victim: Peer, before: int) -> bool:
        """Whether the fault happened. One that did not is taken back."""
        self._kill_trainer_at = None
        try:
            told = await victim.call(Arm(call=victim.next_call(), fault=None), deadline_s=self._pace.start_s)
        except ComponentDied:
            return True
        return told.struck > before

    async def _train_on(self, trial: Trial) -> None:
        if trial.trains_on_s is not None:
            await asyncio.sleep(trial.trains_on_s)
            with suppress(ComponentDied):
                await self._train()

    async def _wake(self, victim: Peer, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if victim.process.poll() is None:
            os.kill(victim.process.pid, signal.SIGCONT)

    def at_stage(self, stage: str) -> None:
        if self._kill_trainer_at == stage:
            self._kill_trainer_at = None
            self.trainer.peer.process.kill()

    async def _healed(self, number: int) -> None:
        """Until every engine serves this version or a later one; a trainer that dies meanwhile is replaced."""
        while min(engine.version for engine in self.engines) < number:
            self._served.clear()
            news = asyncio.ensure_future(self._served.wait())
            died = self.trainer.peer.died
            await asyncio.wait({news, died, *self._publishing}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            for task in self._publishing:
                if task.done() and isinstance(error := task.exception(), ComponentDied) and error.who == "trainer":
                    await died
                elif task.done():
                    task.result()
            if died.done():
                number = await self._go_on_with_another_trainer()

    # ── Trainer ──────────────────────────────────────────────────────────────────────────────────────────

    async def _train(self, *, due: bool = True) -> int:
        """The next version. As after a restore, a number is never used again."""
        self._number = number = self._number + 1
        self._published.add(number)
        await self.trainer.rename(number)
        if due:
            self._publication.produced(self._version(number), due=True)
        return number

    def _version(self, number: int) -> WeightVersion:
        return WeightVersion(number=number, parent=number - 1, step=number)

    async def _start_trainer(self) -> None:
        sender = {"payload": self._payload, "dtype": DTYPE, "anchor_every": 10}
        peer = await self._fork("trainer", children.trainer, {"sender": sender, "device": self._device})
        self.trainer = TimedTrainer(peer, step_s=self._pace.start_s, stage_s=self._pace.deadline_s, close_s=10.0)
        self.trainer.waits = self.waits
        await ready(peer, TrainerReady, self._pace.start_s)
        self._parts = PublicationParts(
            trainer=self.trainer,
            publisher=TimedPublisher(self._config, self),
            engines=self.pool,
            journal=NoJournal(),  # type: ignore[arg-type]
            telemetry=self._events,  # type: ignore[arg-type]
            served=self._served.set,
            replace=self._replace,
        )
        self._publication = Publication(self._config, self._parts)
        self._publishing = [asyncio.create_task(self._publication.run()), asyncio.create_task(self._revive())]

    async def _go_on_with_another_trainer(self) -> int:
        for task in self._publishing:
            task.cancel()
        await asyncio.gather(*self._publishing, return_exceptions=True)
        await self.trainer.peer.kill()
        self.replaced.append("trainer")
        await self._start_trainer()
        return await self._train()

    # ── Engines ──────────────────────────────────────────────────────────────────────────────────────────

    async def _replace(self, engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        self.replaced.append(engine.name)
        await engine.peer.kill()
        engine.adopt(await self._engine_process(engine.name))
        await ready(engine.peer, EngineReady, self._pace.start_s)

    async def _revive(self) -> None:
        while True:
            await self._publication.revive(await self._deaths.get())

    async def _engine_process(self, name: str) -> Peer:
        room = ADAPTER_ROOM if self._payload == "adapter" else {}
        options = {
            "name": name,
            "model": str(self._folder / "model"),
            "engine": {
                "type": "native",
                "device": self._device,
                "dtype": DTYPE,
                "max_context": 128,
                "max_running": 8,
                **room,
            },
            "threads": 1,
            "deadline_s": self._pace.deadline_s,
        }
        return await self._fork(name, children.engine, options)

    async def _fork(self, name: str, entry: Any, options: dict[str, Any]) -> Peer:
        return await fork(self._context, name, entry, options, self._channel, self._folder / f"{name}.log")

    # ── What must hold at all times ──────────────────────────────────────────────────────────────────────

    async def _sample(self, lane: int) -> None:
        """One request after another. Each ends, whatever becomes of engines."""
        for turn in itertools.count():
            rng = np.random.default_rng([lane, turn])
            request = SampleRequest(
                id=1 + lane + self._load * turn,
                context=rng.integers(0, VOCAB, 8).astype(np.int32),
                max_tokens=48,
                seed=turn,
            )
            answer = await self.pool.sample(request)
            self._answers[lane] += 1
            versions = answer.versions.tolist()
            if not set(versions) <= self._published or versions != sorted(versions) or len(versions) == 0:
                self.wrong.append(f"a turn has the versions {versions}")
            await asyncio.sleep(0.02)

    async def _look(self, engine: RemoteEngine) -> None:
        """Ask, again and again, what the engine serves: it has exactly the bits of the version that it claims."""
        while True:
            await asyncio.sleep(0.05)
            with suppress(ComponentDied):
                await self._check(engine)

    async def _check_engines(self) -> None:
        for engine in self.engines:
            try:
                told = await self._check(engine)
            except ComponentDied as error:
                self.wrong.append(str(error))
                continue
            if told.version != engine.version:
                self.wrong.append(f"{engine.name} serves {told.version} and is thought to serve {engine.version}")

    async def _check_requests(self) -> None:
        """All that ran are answered, and others after them."""
        answered, end = list(self._answers), time.monotonic() + self._pace.healed_s
        while any(now == before for now, before in zip(self._answers, answered, strict=True)):
            failed = [task.exception() for task in self._tasks if task.done()]
            if failed or time.monotonic() > end:
                self.wrong.append(f"requests are not answered: {failed or 'they hang'}")
                return
            await asyncio.sleep(0.005)

    async def _check(self, engine: RemoteEngine) -> TellTruth:
        told: TellTruth = await engine.peer.call(
            AskTruth(call=engine.peer.next_call()), deadline_s=self._pace.start_s
        )
        if told.version not in self._published | {-1}:
            self.wrong.append(f"{engine.name} claims version {told.version}, which was never published")
        if told.digests != expected(self._payload, told.version):
            self.wrong.append(f"{engine.name} has other bits than those of version {told.version}")
        return told
