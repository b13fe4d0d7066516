"""A trainer in a process of its own: the process's loop, the controller's client, and what passes between."""

from __future__ import annotations

import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.errors import Superseded, SyncError
from headrace.ipc import BlockingChannel, Notice, Peer, Stop, error_to_record, settle_memory
from headrace.records import Batch, Record, WeightVersion, message
from headrace.sync.base import Destination, Manifest, Seal
from headrace.training.base import StepReport
from headrace.training.config import TrainingConfig
from headrace.usage import Stopwatch, Usage

if TYPE_CHECKING:
    from headrace.sync import Sender
    from headrace.training.trainer import LocalTrainer


@message
class TrainerReady(Record):
    call: int
    vocabulary: int


@message
class Train(Record):
    call: int
    batch: Batch


@message
class Trained(Record):
    call: int
    report: StepReport


@message
class Stage(Record):
    call: int
    version: WeightVersion
    to: tuple[Destination, ...]


@message
class Staged(Record):
    call: int
    manifest: Manifest


@message
class AskSeal(Record):
    call: int
    number: int


@message
class TellSeal(Record):
    call: int
    seal: Seal


@message
class Restage(Record):
    call: int
    number: int
    to: tuple[Destination, ...]


@message
class Restaged(Record):
    call: int
    manifest: Manifest
    seal: Seal


@message
class Save(Record):
    """Write to `path`, a folder for "checkpoint" and "export", a file for "version"."""

    call: int
    what: str
    path: str
    version: int = 0
    state: dict[str, Any] = {}


@message
class Load(Record):
    call: int
    folder: str


@message
class SetVersion(Record):
    """The weights as they are now are called `version` from here on."""

    call: int
    version: int


@message
class TrainerState(Record):
    call: int
    state: dict[str, Any]


@message
class AskTrainerUsage(Record):
    call: int


@message
class TellTrainerUsage(Record):
    call: int
    usage: Usage


@message
class TrainerOk(Record):
    call: int


@message
class Saved(Record):
    call: int
    digest: str
    """The checkpoint's."""


# ── The trainer's process ────────────────────────────────────────────────────────────────────────────────


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """The process's entry."""
    import torch

    from headrace.sync import open_sender
    from headrace.training.trainer import LocalTrainer

    config = msgspec.convert(options["training"], TrainingConfig)
    torch.set_num_threads(options["threads"])
    trainer = LocalTrainer(
        config, model=options["model"], seed=options["seed"], max_staleness=options["max_staleness"]
    )
    sender = open_sender(options["channel"], **options["sender"])
    TrainerServer(sock, trainer, sender, gives_back=options["gives_back"]).serve()


class TrainerServer:
    """Answers one call after another until told to stop; those of publication on a thread of their own."""

    def __init__(self, sock: socket.socket, trainer: LocalTrainer, sender: Sender, *, gives_back: bool = False):
        """`gives_back`: between training steps the memory that they need is for others."""
        self._trainer = trainer
        self._gives_back = gives_back
        self._tokens = 0
        self._watch = Stopwatch()
        self._publishing = _Publishing(trainer, sender, self._send)
        self._channel = BlockingChannel(sock, divert=self._publishing.take)
        trainer.on_event = lambda kind, fields: self._channel.send(Notice(kind=kind, fields=fields))
        self._channel.send(TrainerReady(call=0, vocabulary=trainer.vocabulary))

    def serve(self) -> None:
        if threading.current_thread() is threading.main_thread():
            settle_memory()
        while True:
            with self._watch.state("idle"):
                record = self._channel.receive()
            if isinstance(record, Stop):
                return
            try:
                self._channel.send(self._answer(record))
            except Exception as error:
                traceback.print_exc()
                self._channel.send(error_to_record(record.call, error))

    def _send(self, record: Any) -> None:
        self._channel.send(record)

    def _answer(self, record: Any) -> Any:
        trainer = self._trainer
        if isinstance(record, Train):
            begun = time.perf_counter()
            with self._watch.state("busy"):
                report = trainer.train(record.batch)
                if self._gives_back:
                    trainer.give_memory_back()
            self._tokens += int(report.metrics["tokens_trained"])
            seconds = time.perf_counter() - begun
            return Trained(call=record.call, report=msgspec.structs.replace(report, seconds=seconds))
        if isinstance(record, Save):
            if record.what == "checkpoint":
                return Saved(call=record.call, digest=trainer.save(record.path, record.state))
            if record.what == "export":
                trainer.export(record.path)
            else:
                trainer.keep(record.version, record.path)
        elif isinstance(record, Load):
            return TrainerState(call=record.call, state=trainer.load(record.folder))
        elif isinstance(record, SetVersion):
            trainer.version = record.version
        elif isinstance(record, AskTrainerUsage):
            return TellTrainerUsage(call=record.call, usage=self._usage())
        return TrainerOk(call=record.call)

    def _usage(self) -> Usage:
        held, allocated = self._trainer.device_peaks()
        usage = self._watch.usage(tokens=self._tokens)
        return msgspec.structs.replace(usage, device_peak=held, device_allocated=allocated)


class _Publishing:
    """Copies versions out beside training. Its thread alone uses the sender."""

    def __init__(self, trainer: LocalTrainer, sender: Sender, answer: Callable[[Any], None]):
        self._trainer = trainer
        self._sender = sender
        self._answer = answer
        self._outcome: Seal | Exception | None = None
        """Of the version that was staged last."""
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="headrace-publish", daemon=True).start()

    def take(self, record: Any) -> bool:
        if isinstance(record, Stage | AskSeal | Restage):
            self._work.put(record)
            return True
        return False

    def _run(self) -> None:
        with self._trainer.side_stream():
            while True:
                record = self._work.get()
                try:
                    self._act(record)
                except Exception as error:
                    if not isinstance(error, SyncError):
                        traceback.print_exc()
                    self._answer(error_to_record(record.call, error))

    def _act(self, record: Any) -> None:
        if isinstance(record, Stage):
            self._stage(record)
        elif isinstance(record, Restage):
            manifest, seal = self._sender.again(record.number, record.to)
            self._answer(Restaged(call=record.call, manifest=manifest, seal=seal))
        elif isinstance(self._outcome, Seal) and self._outcome.number == record.number:
            self._answer(TellSeal(call=record.call, seal=self._outcome))
        elif isinstance(self._outcome, Exception):
            raise self._outcome
        else:
            raise SyncError("transfer", "trainer", f"version {record.number} was not staged")

    def _stage(self, record: Stage) -> None:
        self._outcome, trainer, wanted = None, self._trainer, record.version.number
        with trainer.weights_at_rest():
            if trainer.version != wanted or trainer.between:
                raise Superseded("announce", "trainer", f"version {wanted} has been trained on")
            manifest = self._sender.stage(record.version, trainer.tensors(), adapter=trainer.adapter, to=record.to)
            self._answer(Staged(call=record.call, manifest=manifest))
            try:
                self._outcome = self._sender.pack()
            except Exception as error:
                traceback.print_exc()
                self._outcome = error


# ── The controller's client ──────────────────────────────────────────────────────────────────────────────


class RemoteTrainer:
    """The Trainer of a process, over its peer."""

    def __init__(self, peer: Peer, *, step_s: float, stage_s: float, close_s: float):
        self.peer = peer
        self.vocabulary: int | None = None
        """Tokens that its model knows, once it has said so."""
        self._step_s = step_s
        self._stage_s = stage_s
        self._close_s = close_s

    async def train(self, batch: Batch) -> StepReport:
        return (await self._call(Train(call=self.peer.next_call(), batch=batch))).report

    async def stage(self, version: WeightVersion, to: Sequence[Destination]) -> Manifest:
        return (await self._publish(Stage(call=self.peer.next_call(), version=version, to=tuple(to)))).manifest

    async def seal(self, number: int) -> Seal:
        return (await self._publish(AskSeal(call=self.peer.next_call(), number=number))).seal

    async def restage(self, number: int, to: Sequence[Destination]) -> tuple[Manifest, Seal]:
        reply = await self._publish(Restage(call=self.peer.next_call(), number=number, to=tuple(to)))
        return reply.manifest, reply.seal

    async def save(self, folder: str, state: dict[str, Any]) -> str:
        reply = await self._call(Save(call=self.peer.next_call(), what="checkpoint", path=folder, state=state))
        return str(reply.digest)

    async def export(self, folder: str) -> None:
        await self._call(Save(call=self.peer.next_call(), what="export", path=folder))

    async def keep(self, version: int, file: str) -> None:
        await self._call(Save(call=self.peer.next_call(), what="version", path=file, version=version))

    async def load(self, folder: str) -> dict[str, Any]:
        return (await self._call(Load(call=self.peer.next_call(), folder=folder))).state

    async def rename(self, version: int) -> None:
        await self._call(SetVersion(call=self.peer.next_call(), version=version))

    async def usage(self) -> Usage:
        return (await self._call(AskTrainerUsage(call=self.peer.next_call()))).usage

    async def close(self) -> None:
        await self.peer.close(self._close_s)

    async def _call(self, record: Any) -> Any:
        return await self.peer.call(record, deadline_s=self._step_s)

    async def _publish(self, record: Any) -> Any:
        return await self.peer.call(record, deadline_s=self._stage_s, look_at="sync.deadline_s, logs/trainer.log")
