"""A native engine in a process of its own, and the sender that feeds it from this one."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.engine import serve
from headrace.engine.messages import EngineReady
from headrace.engine.remote import RemoteEngine
from headrace.ipc import Peer
from headrace.models import CausalLM, ModelConfig, random_model, save_model
from headrace.orchestration.processes import ready, spawn
from headrace.records import WeightVersion
from headrace.sync import open_channel, open_sender
from headrace.sync.base import Destination, Manifest, Seal
from headrace.sync.sender import Sender

VOCAB = 32
DTYPE = "float32"
"""Published, and served on every device, where `auto` may mean another one."""
# Weights large enough that the distributions are far from uniform and every version's is another.
MODEL = ModelConfig(
    family="qwen2",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
    initializer_range=0.3,
)


def fresh_model(version: int) -> CausalLM:
    """The weights that are published as `version`: every tensor, biases and norms too, is another in each."""
    model = random_model(MODEL, seed=1000 + version)
    draw = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model.requires_grad_(False)


version_of = cache(fresh_model)


class Published:
    """An engine process and the sender of its weights."""

    def __init__(self, engine: RemoteEngine, sender: Sender, device: str):
        self.engine = engine
        self._sender = sender
        self._device = device

    async def stage(self, version: WeightVersion) -> tuple[Manifest, Seal]:
        to = [Destination(name=self.engine.name, version=self.engine.version)]
        named = version_of(version.number).named_parameters()
        return self._sender.send(version, {name: own.to(self._device) for name, own in named}, to=to)


@asynccontextmanager
async def native_process(
    folder: Path,
    *,
    transport: str = "shared_memory",
    entry: str = "headrace.engine.serve:start",
    device: str = "cpu",
    **settings: Any,
) -> AsyncIterator[Published]:
    """`settings` are the engine's; `entry` is where its process begins. Over "in_process" it is a thread."""
    model = folder / "model"
    save_model(fresh_model(0).state_dict(), MODEL, model)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    channel = open_channel(transport, folder=str(folder / "weights"))
    fds = [channel["descriptor"]] if "descriptor" in channel else []
    options = {
        "model": str(model),
        "engine": {"type": "native", "device": device, "dtype": DTYPE, **settings},
        "threads": 1,
        "channel": channel,
        "deadline_s": 30.0,
    }
    sender = open_sender(channel, dtype=DTYPE)
    if transport == "in_process":
        peer = await threaded("engine-0", serve.start, options)
    else:
        peer = await spawn("engine-0", entry, options, logs=folder / "logs", fds=fds)
    engine = RemoteEngine(peer, deadline_s=30.0, close_s=10.0)
    try:
        await ready(peer, EngineReady, 60.0)
        yield Published(engine, sender, device)
    finally:
        await engine.close()
        sender.close()
        for descriptor in fds:
            os.close(descriptor)


async def threaded(
    name: str, start: Callable[[socket.socket, dict[str, Any]], None], options: dict[str, Any]
) -> Peer:
    """As `spawn`, in this process."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=start, args=(theirs, {**options, "name": name}), daemon=True)
    thread.start()
    # An engine's process ends at once when its connection closes. This one has tests to run: it stays open.
    os.dup(ours.fileno())
    ours.setblocking(False)
    peer = Peer(name, _Threaded(thread))
    await peer.connect(ours)
    return peer


class _Threaded:
    """A thread that stands for a child process."""

    def __init__(self, thread: threading.Thread):
        self.pid = os.getpid()
        self._thread = thread

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def kill(self) -> None: ...

    async def wait(self, seconds: float) -> int | None:
        await asyncio.to_thread(self._thread.join, seconds)
        return self.poll()
