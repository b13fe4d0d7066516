"""Small random models built by transformers, the independent reference of this room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Large enough for attention and gates to be far from uniform, so that a wrong rotation shows.
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def build_reference(family: str, **overrides: Any) -> transformers.PreTrainedModel:
    """A random transformers model in float32; its norms and biases are random too, or they would test nothing."""
    settings = {**SIZES, **({"head_dim": 8} if family == "qwen3" else {}), **overrides}
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family](**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def reference() -> Callable[..., transformers.PreTrainedModel]:
    return build_reference


@pytest.fixture
def saved_reference(tmp_path: Path) -> Callable[..., tuple[transformers.PreTrainedModel, Path]]:
    """Build a reference model and save it: (model, folder)."""

    def build(family: str, max_shard_size: str = "5GB", **overrides: Any):
        model = build_reference(family, **overrides)
        folder = tmp_path / "reference"
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model, folder

    return build


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    def draw(count: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, SIZES["vocab_size"], (count,), generator=generator)

    return draw
