"""Full weights through CUDA IPC: a version's time beside one copy on the device, and what generation notices of it.

The sender is this process, as a trainer would be, with weights in the published dtype; the engine has its own. A
version's time runs from its announcement to its acknowledgement; packing it, which runs beside training, is apart.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

import torch

from headrace.bench.engine import drive
from headrace.bench.engine.shapes import config_of, random_weights
from headrace.bench.sync.served import all_have, served, stages_ms
from headrace.sync import open_channel, open_sender
from headrace.sync.config import SyncConfig
from headrace.sync.schedule import Published, Publisher

SEQUENCES, CONTEXT, VERSIONS = 256, 512, 6


def measure(shape: str = "8b", seed: int = 0) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures). Needs a GPU."""
    return asyncio.run(_measure(shape, seed))


def copy_limit_s(nbytes: int, times: int = 5) -> float:
    """One copy of so many bytes from one place on the device to another."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    best = float("inf")
    for _ in range(times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


async def _measure(shape: str, seed: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    model = random_weights(config_of(shape), torch.device("cuda"), seed + 1)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    limit_s = copy_limit_s(nbytes)
    drive.free_memory()
    channel = open_channel("cuda_ipc")
    sender = open_sender(channel, dtype="bfloat16")
    publisher = Publisher(SyncConfig(deadline_s=30.0))
    size: dict[str, Any] = {"running": SEQUENCES, "context": 4 * CONTEXT, "cache_tokens": SEQUENCES * 3 * CONTEXT}
    rows: list[dict[str, Any]] = []
    async with served(shape, "cuda", channel, **size) as there:

        async def publish() -> tuple[float, Published]:
            version, to = there.next_version()
            begun = time.perf_counter()
            manifest, seal = await asyncio.to_thread(sender.send, version, tensors, to=to)
            packed = time.perf_counter() - begun
            return packed, all_have(await publisher.publish(manifest, seal, [there.engine]))

        async def several(load: str) -> dict[str, Any]:
            await publish()
            await publish()
            await there.gaps_ms()
            done = []
            for _ in range(VERSIONS):
                done.append(await publish())
                await asyncio.sleep(0.1)
            gaps = await there.gaps_ms()
            seconds = [published.seconds for _, published in done]
            return drive.kept(
                {
                    "part": "cuda ipc",
                    "shape": shape,
                    "load": load,
                    "gb": nbytes / 1e9,
                    "copy_limit_ms": 1e3 * limit_s,
                    "sync_ms": 1e3 * statistics.median(seconds),
                    "sync_ms_best": 1e3 * min(seconds),
                    "over_copy_limit": statistics.median(seconds) / limit_s,
                    "pack_ms": 1e3 * statistics.median(one[0] for one in done),
                    "host_pause_ms": 1e3 * max(published.pause_s for _, published in done),
                    **stages_ms(published for _, published in done),
                    "device_gap_ms_max": max(gaps, default=0.0),
                }
            )

        rows.append(await several("none"))
        vocabulary = config_of(shape).vocab_size
        async with there.busy(SEQUENCES, CONTEXT, 2 * CONTEXT, vocabulary):
            rows.append(await several(f"{SEQUENCES} sequences"))
    sender.close()
    os.close(channel["descriptor"])
    idle, loaded = rows
    figures = {
        f"ipc_over_copy_limit_{shape}": idle["over_copy_limit"],
        f"ipc_pause_ms_{shape}": loaded["device_gap_ms_max"],
    }
    return rows, figures
