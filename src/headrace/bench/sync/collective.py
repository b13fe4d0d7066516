"""Broadcast in buckets beside a broadcast of each parameter, between the same two processes, in turns.

    bucketed        float32 weights are cast into the image while its buckets are sent, and arrive in the engine's
                    buffers: the transport `collective` as it is
    checked         the same through Sender and Receiver: checksums of every tensor made and compared
    per_parameter   each parameter cast, broadcast, received into a fresh tensor and copied into place
    in_place        each parameter cast, broadcast and received in its place

The engine's process is this module run as a program. Times are medians of the rounds, from the beginning until the
engine's process has said that it has everything.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from headrace.bench.engine.drive import kept, say
from headrace.bench.engine.shapes import config_of
from headrace.models import parameter_shapes
from headrace.records import WeightVersion
from headrace.sync import open_channel
from headrace.sync.base import Destination, Manifest, Seal, Stream, TensorSpec
from headrace.sync.deadline import Deadline
from headrace.sync.payload.full import image_of, pack, place
from headrace.sync.receiver import Receiver
from headrace.sync.sender import Sender
from headrace.sync.transport import open_inlet, open_outlet

WAYS = ("bucketed", "checked", "per_parameter", "in_place")
ENGINE = "engine-0"
DTYPE = torch.bfloat16
LIMIT_S = 120.0


class Job(msgspec.Struct):
    """What the engine's process is told at the beginning."""

    shape: str
    channel: dict[str, Any]
    port: int
    """Of the store where the two meet for broadcasts of parameters."""


class Round(msgspec.Struct):
    way: str
    manifest: Manifest | None = None
    """What is sent, for the transport's own ways."""
    seal: Seal | None = None
    digest: bool = False
    """Say what has arrived, in buffers that were empty before."""


def measure(
    shape: str, *, rounds: int = 12, ways: Sequence[str] = WAYS, options: Mapping[str, Any] | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures). `options` are those of the transport's outlet. One thread of torch's in each process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = _Trainer(shape, dict(options or {}))
    try:
        say(f"broadcast {shape}: {trainer.nbytes / 1e9:.2f} GB, {rounds} rounds …")
        expected = xxhash.xxh3_64_intdigest(trainer.image().numpy().data)
        for way in ways:
            found = trainer.take(way, digest=True)[1]
            if found != expected:
                raise RuntimeError(f"{way}: what arrived is not what was sent")
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                seconds[way].append(trainer.take(way)[0])
    finally:
        trainer.close()
        torch.set_num_threads(threads)
    rows = [_row(shape, way, trainer.nbytes, times) for way, times in seconds.items()]
    taken = {way: statistics.median(times) for way, times in seconds.items()}
    figures = {
        f"{ours}_over_{theirs}": taken[theirs] / taken[ours]
        for ours in ("bucketed", "checked")
        for theirs in ("per_parameter", "in_place")
        if ours in taken and theirs in taken
    }
    return rows, figures


def _row(shape: str, way: str, nbytes: int, times: list[float]) -> dict[str, Any]:
    return kept(
        {
            "part": "broadcast",
            "shape": shape,
            "way": way,
            "mb": nbytes / 1e6,
            "rounds": len(times),
            "seconds": statistics.median(times),
            "seconds_best": min(times),
            "gb_per_s": nbytes / statistics.median(times) / 1e9,
        }
    )


# ── The trainer's process ────────────────────────────────────────────────────────────────────────────────


class _Trainer:
    def __init__(self, shape: str, options: dict[str, Any]):
        draw = torch.Generator().manual_seed(0)
        self._tensors = {
            name: torch.randn(size, generator=draw) for name, size in parameter_shapes(config_of(shape)).items()
        }
        self._specs, self.nbytes = image_of(self._tensors, DTYPE)
        self._channel = open_channel("collective", **options)
        self._outlet = open_outlet(self._channel)
        self._sender = Sender(self._outlet, dtype=DTYPE)
        self._version = 0
        store, port = _serve()
        self._engine = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._channel["descriptor"],),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._tell(Job(shape=shape, channel=self._channel, port=port))
        self._plain = _plain_group(store, 0)

    def image(self) -> Tensor:
        image = torch.empty(self.nbytes, dtype=torch.uint8)
        pack(self._specs, self._tensors, image)
        return image

    def take(self, way: str, *, digest: bool = False) -> tuple[float, int]:
        """(seconds, what the engine says about the bytes it has now)."""
        if digest:
            self._tell(Round(way="empty"))
            self._answer()
        began = time.perf_counter()
        {"bucketed": self._bucketed, "checked": self._checked}.get(way, self._parameters)(way, digest)
        answer = self._answer()
        return time.perf_counter() - began, answer

    def close(self) -> None:
        assert self._engine.stdin is not None
        self._engine.stdin.close()
        self._engine.wait(LIMIT_S)
        self._sender.close()
        os.close(self._channel["descriptor"])

    def _bucketed(self, way: str, digest: bool) -> None:
        number = self._next()
        draft = Manifest(
            version=number,
            payload="full",
            transport=self._outlet.name,
            tensors=self._specs,
            nbytes=self.nbytes,
            streams=(Stream(number=number.number, nbytes=self.nbytes),),
        )
        memory = self._outlet.open(draft, self._to(), torch.device("cpu"))
        stream = msgspec.structs.replace(draft.streams[0], location=self._outlet.location())
        self._tell(Round(way=way, manifest=msgspec.structs.replace(draft, streams=(stream,)), digest=digest))
        pack(self._specs, self._tensors, memory, self._outlet.advance)

    def _checked(self, way: str, digest: bool) -> None:
        manifest = self._sender.stage(self._next(), self._tensors, to=self._to())
        self._tell(Round(way=way, manifest=manifest, digest=digest))
        self._tell(Round(way=way, seal=self._sender.pack()))

    def _parameters(self, way: str, digest: bool) -> None:
        self._tell(Round(way=way, digest=digest))
        for tensor in self._tensors.values():
            _broadcast(self._plain, tensor.to(DTYPE))

    def _next(self) -> WeightVersion:
        self._version += 1
        return WeightVersion(number=self._version, parent=self._version - 1, step=self._version)

    def _to(self) -> list[Destination]:
        """The engine, which has the version before."""
        return [Destination(name=ENGINE, version=self._version - 1)]

    def _tell(self, what: msgspec.Struct) -> None:
        assert self._engine.stdin is not None
        self._engine.stdin.write(msgspec.json.encode(what) + b"\n")
        self._engine.stdin.flush()

    def _answer(self) -> int:
        assert self._engine.stdout is not None
        line = self._engine.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine's process ended with {self._engine.wait()}")
        return int(line)


# ── The engine's process ─────────────────────────────────────────────────────────────────────────────────


class _Engine:
    def __init__(self, job: Job, incoming: IO[bytes]):
        kinds = {
            name: torch.empty(size, dtype=DTYPE, device="meta")
            for name, size in parameter_shapes(config_of(job.shape)).items()
        }
        specs, nbytes = image_of(kinds, DTYPE)
        self._specs: Sequence[TensorSpec] = specs
        self._block = torch.zeros(nbytes, dtype=torch.uint8)
        self._standby = {spec.name: place(spec, self._block) for spec in specs}
        self._incoming = incoming
        self._inlet = open_inlet(job.channel, ENGINE)
        self._receiver = Receiver(self._inlet, who=ENGINE, deadline_s=LIMIT_S)
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False)
        self._plain = _plain_group(store, 1)
        self._order = list(kinds)

    def take(self, told: Round) -> int:
        """What the buffers hold after it; 0 where that was not asked."""
        ways: dict[str, Callable[[Round], object]] = {
            "bucketed": self._bucketed,
            "checked": self._checked,
            "per_parameter": self._per_parameter,
            "in_place": self._in_place,
            "empty": lambda told: self._block.zero_(),
        }
        ways[told.way](told)
        return xxhash.xxh3_64_intdigest(self._block.numpy().data) if told.digest else 0

    def close(self) -> None:
        self._receiver.close()

    def _bucketed(self, told: Round) -> None:
        assert told.manifest is not None
        deadline = Deadline(LIMIT_S, ENGINE, "the stream")
        for _ in self._inlet.chunks(told.manifest.streams[0], deadline, self._block):
            pass

    def _checked(self, told: Round) -> None:
        assert told.manifest is not None
        self._receiver.receive(told.manifest, self._standby)
        sealed = msgspec.json.decode(self._incoming.readline(), type=Round)
        assert sealed.seal is not None
        self._receiver.verify(told.manifest, sealed.seal, self._standby)

    def _per_parameter(self, told: Round) -> None:
        for name in self._order:
            fresh = torch.empty(self._standby[name].shape, dtype=DTYPE)
            _broadcast(self._plain, fresh)
            self._standby[name].copy_(fresh)

    def _in_place(self, told: Round) -> None:
        for name in self._order:
            _broadcast(self._plain, self._standby[name])


def _serve() -> tuple[dist.Store, int]:
    """A store of torch's and its port, at the loopback address: random numbers are all that travels here."""
    listening = socket.create_server(("127.0.0.1", 0))
    port: int = listening.getsockname()[1]
    descriptor = listening.detach()
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=descriptor
    )
    return store, port


def _plain_group(store: dist.Store, rank: int) -> Any:
    """As `init_process_group` makes one, at the loopback address."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=LIMIT_S)
    return gloo(store, rank, 2, options)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def main() -> None:
    torch.set_num_threads(1)
    incoming = sys.stdin.buffer
    engine = _Engine(msgspec.json.decode(incoming.readline(), type=Job), incoming)
    while line := incoming.readline():
        print(engine.take(msgspec.json.decode(line, type=Round)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
