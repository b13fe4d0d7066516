"""The weights of the fault trials, and of an adapter over them: a function of the version's number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from headrace.models import ModelConfig, random_model, save_model
from headrace.sync.base import AdapterSpec
from headrace.sync.digest import digests
from headrace.training.config import LoraConfig

VOCAB = 128
MODEL = ModelConfig(
    family="qwen2",
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    qkv_bias=True,
    initializer_range=0.3,
)
# Fewer columns than an engine has room for, so that what it serves lies in pieces.
ADAPTER = AdapterSpec(name="policy", rank=12, alpha=24.0, targets=LoraConfig().targets)
ADAPTER_ROOM = {"max_adapters": 1, "max_adapter_rank": 16}
_CLASSES = 16


def weights(version: int) -> dict[str, Tensor]:
    """The bits of a version, wherever they are asked for. Between any two versions about an eighth differ."""
    return _changed(_BASE, version)


def adapter(version: int) -> dict[str, Tensor]:
    """The same of an adapter."""
    return _changed(_ADAPTER_BASE, version)


def _changed(base: dict[str, Tensor], version: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in base.items():
        changed = tensor.clone()
        changed.view(-1)[version % _CLASSES :: _CLASSES] += 1e-4 * (1 + version * 7919 % 1009)
        found[name] = changed
    return found


@cache
def expected(payload: str, version: int) -> tuple[int, ...]:
    """The digests of what an engine serves as `version`: its parameters, and then the adapter's if it has one.
    Before its first version there is what its folder has, which beneath an adapter stays."""
    if payload != "adapter":
        return bits(weights(max(version, 0)))
    return bits(weights(0)) + (bits(adapter(version)) if version >= 0 else ())


def bits(tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(digests([tensors[name].contiguous() for name in sorted(tensors)]))


def save(model: Path) -> None:
    """What an engine has before its first version."""
    if not model.exists():
        save_model(weights(0), MODEL, model)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(model / "tokenizer.json"))


def _random_adapter() -> dict[str, Tensor]:
    """By PEFT's names."""
    found, draw = {}, torch.Generator().manual_seed(1)
    for name, tensor in _BASE.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.endswith(ADAPTER.targets):
            for side, shape in ("A", (ADAPTER.rank, tensor.shape[1])), ("B", (tensor.shape[0], ADAPTER.rank)):
                found[f"base_model.model.{module}.lora_{side}.weight"] = 0.1 * torch.randn(shape, generator=draw)
    return found


# Made on import, in the process that the others are forked from: what torch imports for it takes seconds.
_BASE = {name: parameter.detach() for name, parameter in random_model(MODEL, seed=1).named_parameters()}
_ADAPTER_BASE = _random_adapter()
