"""Full weights through shared memory beside this machine's memcpy.

sender (this process)      pack ─▶ segment           receiver (another)   segment ─▶ standby block ─▶ checksums

First both ends at once: the sender packs and the receiver follows, from the announcement to the last byte. Then the
receiver alone, in turn: it copies one warm buffer to its standby block (memcpy), and the version, which is packed
already, to that same block (transfer). Checksums come after it and are apart.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.ipc import BlockingChannel, Peer, Stop, error_to_record
from headrace.models import parameter_shapes
from headrace.orchestration.processes import ready, spawn
from headrace.records import Record, WeightVersion, message
from headrace.sync import lay_out, open_channel, open_receiver, open_sender
from headrace.sync.base import Manifest, Seal

ROUNDS = 6
DEADLINE_S = 120.0


@message
class MemoryReady(Record):
    call: int


@message
class MemoryWork(Record):
    """With a seal: verify; with a manifest alone: receive; with neither: copy one buffer to the block."""

    call: int
    manifest: Manifest | None = None
    seal: Seal | None = None


@message
class MemoryDone(Record):
    call: int
    begun: float
    """On the clock that all processes of a machine share."""
    ended: float


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """The receiving process's entry."""
    shapes = parameter_shapes(config_of(options["shape"]))
    kinds = {name: ("bfloat16", shape, 2 * int(np.prod(shape))) for name, shape in shapes.items()}
    specs, nbytes = lay_out(kinds)
    block = torch.from_numpy(np.ones(nbytes, np.uint8))
    standby = {
        spec.name: block[spec.offset : spec.offset + spec.nbytes].view(torch.bfloat16).view(spec.shape)
        for spec in specs
    }
    other, target = np.ones(nbytes, np.uint8), block.numpy()
    receiver = open_receiver(options["channel"], deadline_s=DEADLINE_S)
    channel = BlockingChannel(sock)
    channel.send(MemoryReady(call=0))
    while not isinstance(work := channel.receive(), Stop):
        try:
            begun = time.monotonic()
            if work.manifest is None:
                np.copyto(target, other)
            elif work.seal is None:
                receiver.receive(work.manifest, standby)
            else:
                receiver.verify(work.manifest, work.seal, standby)
            channel.send(MemoryDone(call=work.call, begun=begun, ended=time.monotonic()))
        except Exception as error:
            channel.send(error_to_record(work.call, error))


def measure(shape: str = "0.6b", seed: int = 0) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures)."""
    return asyncio.run(_measure(shape, seed))


async def _measure(shape: str, seed: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    drive.say(f"memory {shape}: {ROUNDS} versions through shared memory …")
    model = random_weights(config_of(shape), torch.device("cpu"), seed)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    channel = open_channel("shared_memory")
    sender = open_sender(channel, dtype="bfloat16")
    spent: dict[str, list[float]] = {}
    async with _receiving(shape, channel) as peer:

        async def ask(manifest: Manifest | None = None, seal: Seal | None = None) -> MemoryDone:
            work = MemoryWork(call=peer.next_call(), manifest=manifest, seal=seal)
            done: MemoryDone = await peer.call(work, deadline_s=DEADLINE_S)
            return done

        for number in range(1, ROUNDS + 2):
            version = WeightVersion(number=number, parent=number - 1, step=number)
            begun = time.monotonic()
            manifest = sender.stage(version, tensors)
            following = asyncio.create_task(ask(manifest))
            seal = await asyncio.to_thread(sender.pack)
            followed = await following
            copy, transfer, check = await ask(), await ask(manifest), await ask(manifest, seal)
            for name, seconds in {
                "whole": followed.ended - begun,
                "transfer": transfer.ended - transfer.begun,
                "memcpy": copy.ended - copy.begun,
                "verify": check.ended - check.begun,
            }.items():
                spent.setdefault(name, []).append(seconds)
    sender.close()
    os.close(channel["descriptor"])
    # The first version touches every page of the segment for the first time.
    best = {name: min(seconds[1:]) for name, seconds in spent.items()}
    rate = {f"{name}_gb_s": manifest.nbytes / 1e9 / seconds for name, seconds in best.items()}
    row = drive.kept(
        {
            "part": "memory",
            "shape": shape,
            "gb": manifest.nbytes / 1e9,
            **rate,
            "transfer_over_memcpy": best["memcpy"] / best["transfer"],
            "whole_over_memcpy": best["memcpy"] / best["whole"],
        }
    )
    return [row], {"shm_over_memcpy": row["transfer_over_memcpy"]}


@asynccontextmanager
async def _receiving(shape: str, channel: dict[str, Any]) -> AsyncIterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        options = {"shape": shape, "channel": channel}
        entry, fds = f"{__name__}:start", [channel["descriptor"]]
        peer = await spawn("receiver", entry, options, logs=Path(scratch), fds=fds)
        try:
            await ready(peer, MemoryReady, DEADLINE_S)
            yield peer
        finally:
            await peer.close(10.0)
