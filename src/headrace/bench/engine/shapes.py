"""The model shapes that are measured, and random weights made where they will run."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models import CausalLM, ModelConfig, Ops, RopeConfig, parameter_shapes

DTYPE = torch.bfloat16


def _qwen3(
    layers: int, hidden: int, inner: int, heads: int, *, kv_heads: int = 8, head_dim: int = 128, vocab: int = 151936
) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        # Of Qwen3's dense models those up to 4B are tied.
        tie_embeddings=hidden < 4096,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=40960,
    )


SHAPES = {
    "0.6b": _qwen3(28, 1024, 3072, 16),
    "8b": _qwen3(36, 4096, 12288, 32),
    "32b": _qwen3(64, 5120, 25600, 64),
    "tiny": _qwen3(2, 64, 128, 4, kv_heads=2, head_dim=16, vocab=512),
}
"""Qwen3's, by the name their figures carry; `tiny` is for a CPU."""


def config_of(shape: str) -> ModelConfig:
    if shape not in SHAPES:
        raise ConfigError("a shape is one of those known", shape, f"known: {', '.join(SHAPES)}")
    return SHAPES[shape]


def random_weights(config: ModelConfig, device: torch.device, seed: int = 0, ops: Ops | None = None) -> CausalLM:
    """Matrices normal with the model's `initializer_range`, norms one; drawn on the device itself.

    A seed gives the same weights each time on one kind of device, and other ones on another.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        weight = state[name] = torch.ones(shape, dtype=DTYPE, device=device)
        if len(shape) == 2:
            weight.normal_(0.0, config.initializer_range, generator=generator)
    with torch.device("meta"):
        model = CausalLM(config, ops)
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False)
