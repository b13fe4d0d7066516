"""A native engine in a process of its own, and the sender that feeds it from this one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.engine.remote import EngineReady, RemoteEngine
from headrace.models import CausalLM, ModelConfig, random_model, save_model
from headrace.orchestration.processes import ready, spawn
from headrace.records import WeightVersion
from headrace.sync import open_channel, open_sender
from headrace.sync.base import Manifest

VOCAB = 32
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

    def __init__(self, engine: RemoteEngine, sender: Any):
        self.engine = engine
        self._sender = sender

    async def stage(self, version: WeightVersion) -> Manifest:
        manifest: Manifest = self._sender.send(version, dict(version_of(version.number).named_parameters()))
        return manifest


@asynccontextmanager
async def native_process(folder: Path, **settings: Any) -> AsyncIterator[Published]:
    model = folder / "model"
    save_model(fresh_model(0).state_dict(), MODEL, model)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    channel = open_channel("shared_memory", "float32")
    options = {
        "model": str(model),
        "engine": {"type": "native", "device": "cpu", **settings},
        "threads": 1,
        "channel": channel,
    }
    peer = await spawn(
        "engine-0", "headrace.engine.remote:start", options, logs=folder / "logs", fds=[channel["descriptor"]]
    )
    engine = RemoteEngine(peer, deadline_s=30.0, close_s=10.0)
    try:
        await ready(peer, EngineReady, 60.0)
        yield Published(engine, open_sender(channel))
    finally:
        await engine.close()
