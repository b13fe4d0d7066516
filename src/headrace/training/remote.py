"""A trainer in a process of its own: the process's loop, the controller's client, and what passes between."""

from __future__ import annotations

import socket
import time
import traceback
from typing import Any

import msgspec

from headrace.errors import LawBroken
from headrace.ipc import BlockingChannel, Peer, Stop, error_to_record
from headrace.records import Batch, Record, WeightVersion, message
from headrace.sync.base import Manifest
from headrace.training.base import StepReport
from headrace.training.config import TrainingConfig
from headrace.usage import Stopwatch, Usage


@message
class TrainerReady(Record):
    call: int


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


@message
class Staged(Record):
    call: int
    manifest: Manifest


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
    TrainerServer(sock, trainer, open_sender(options["channel"])).serve()


class TrainerServer:
    """Answers one call after another until told to stop."""

    def __init__(self, sock: socket.socket, trainer: Any, sender: Any):
        self._trainer = trainer
        self._sender = sender
        self._tokens = 0
        self._watch = Stopwatch()
        self._channel = BlockingChannel(sock)
        self._channel.send(TrainerReady(call=0))

    def serve(self) -> None:
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

    def _answer(self, record: Any) -> Any:
        trainer = self._trainer
        if isinstance(record, Train):
            begun = time.perf_counter()
            with self._watch.state("busy"):
                report = trainer.train(record.batch)
            self._tokens += int(report.metrics["tokens_trained"])
            seconds = time.perf_counter() - begun
            return Trained(call=record.call, report=msgspec.structs.replace(report, seconds=seconds))
        if isinstance(record, Stage):
            if record.version.number != trainer.version:
                what = f"version {record.version.number} is to be staged, the weights are {trainer.version}"
                raise LawBroken("provenance", "trainer", what)
            return Staged(call=record.call, manifest=self._sender.send(record.version, trainer.tensors()))
        if isinstance(record, Save):
            if record.what == "checkpoint":
                trainer.save(record.path, record.state)
            elif record.what == "export":
                trainer.export(record.path)
            else:
                trainer.keep(record.version, record.path)
        elif isinstance(record, Load):
            return TrainerState(call=record.call, state=trainer.load(record.folder))
        elif isinstance(record, SetVersion):
            trainer.version = record.version
        elif isinstance(record, AskTrainerUsage):
            return TellTrainerUsage(call=record.call, usage=self._watch.usage(tokens=self._tokens))
        return TrainerOk(call=record.call)


# ── The controller's client ──────────────────────────────────────────────────────────────────────────────


class RemoteTrainer:
    """The Trainer of a process, over its peer."""

    def __init__(self, peer: Peer, *, step_s: float, close_s: float):
        self.peer = peer
        self._step_s = step_s
        self._close_s = close_s

    async def train(self, batch: Batch) -> StepReport:
        return (await self._call(Train(call=self.peer.next_call(), batch=batch))).report

    async def stage(self, version: WeightVersion) -> Manifest:
        return (await self._call(Stage(call=self.peer.next_call(), version=version))).manifest

    async def save(self, folder: str, state: dict[str, Any]) -> None:
        await self._call(Save(call=self.peer.next_call(), what="checkpoint", path=folder, state=state))

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
