"""One definition of each architecture, used by training and by the native engine.

    config.py, rope_config.py   a model's shape as data          ┐
    shapes.py                   parameter names and shapes       ├ import no torch
    folder.py                   is this folder loadable?         ┘
    ops.py, logprobs.py         the operations a forward pass is made of: a protocol and its reference
    attention.py                what a token attends to: packed sequences, or one with a kept cache
    rope.py, transformer.py     the model itself, over those operations
    io.py                       from and to folders

Importing this package imports no torch; the names below load their module when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.attention import AttentionContext, CachedContext, PackedContext
    from headrace.models.config import ModelConfig
    from headrace.models.folder import check_folder
    from headrace.models.io import load_model, random_model, save_model
    from headrace.models.logprobs import Support, token_logprobs
    from headrace.models.ops import Ops, ReferenceOps
    from headrace.models.rope_config import RopeConfig
    from headrace.models.shapes import parameter_count, parameter_shapes
    from headrace.models.transformer import CausalLM

_HOME = {
    "AttentionContext": "attention",
    "CachedContext": "attention",
    "PackedContext": "attention",
    "ModelConfig": "config",
    "check_folder": "folder",
    "load_model": "io",
    "random_model": "io",
    "save_model": "io",
    "Support": "logprobs",
    "token_logprobs": "logprobs",
    "Ops": "ops",
    "ReferenceOps": "ops",
    "RopeConfig": "rope_config",
    "parameter_count": "shapes",
    "parameter_shapes": "shapes",
    "CausalLM": "transformer",
}

__all__ = [
    "AttentionContext",
    "CachedContext",
    "CausalLM",
    "ModelConfig",
    "Ops",
    "PackedContext",
    "ReferenceOps",
    "RopeConfig",
    "Support",
    "check_folder",
    "load_model",
    "parameter_count",
    "parameter_shapes",
    "random_model",
    "save_model",
    "token_logprobs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
