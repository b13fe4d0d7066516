"""A small model, and how a test publishes a version of its own."""

from __future__ import annotations

import torch

from headrace.engine.base import Interrupt
from headrace.engine.native import NativeEngine
from headrace.models import CausalLM, ModelConfig

SMALL = ModelConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    qk_norm=True,
    initializer_range=0.15,
)


def publish(engine: NativeEngine, version: int, model: CausalLM, interrupt: Interrupt = "keep") -> None:
    """Serve this model's weights as `version`."""
    for name, parameter in model.named_parameters():
        engine.standby[name].copy_(parameter.detach())
    torch.cuda.synchronize()
    engine.swap(version, interrupt)
