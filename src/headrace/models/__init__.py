"""One definition of each architecture, used by training and by the native engine.

    config.py, rope_config.py   a model's shape as data          ┐
    shapes.py                   parameter names and shapes       ├ import no torch
    tensor_files.py             index and headers: which tensors │
    folder.py                   is this folder loadable?         ┘
    ops.py, logprobs.py         the operations a forward pass is made of: a protocol and its reference
    fused.py                    the same over Triton kernels, for inference
    adapted.py                  the same with LoRA adapters, each token with its own
    exact.py, exact_*.py        the same with the same bits in training and in the engine
    attention.py                what a token attends to: packed sequences, or one with a kept cache
    ragged.py                   attention of sequences of any lengths in one call
    quantized.py                FP8: rows with a scale each, and the operations by definition
    quantized_fused.py          the same on CUDA
    trained.py                  kernels that can be differentiated, for training
    divergence.py               how far a student is from a teacher
    paged.py                    attention over pages by the Triton kernels
    joined.py                   weights side by side in memory
    rope.py, transformer.py     the model itself, over those operations
    io.py                       from and to folders
    device.py                   from the host to where a pass computes

Importing this package imports no torch; the names below load their module when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.adapted import AdaptedOps, Stack
    from headrace.models.attention import (
        AttentionContext,
        CacheContext,
        CachedContext,
        PackedContext,
        causal_attention,
        group_by_length,
        masked_attention,
    )
    from headrace.models.config import ModelConfig
    from headrace.models.device import dtype_on, upload
    from headrace.models.divergence import Said, divergences
    from headrace.models.exact import ExactOps
    from headrace.models.exact_paged import InvariantContext
    from headrace.models.folder import check_folder, check_policy
    from headrace.models.fused import FusedOps
    from headrace.models.io import load_model, random_model, refuse_non_finite, save_model, stored_dtype
    from headrace.models.joined import join, joined_names, side_by_side
    from headrace.models.logprobs import Support, token_logprobs
    from headrace.models.ops import Ops, ReferenceOps, Rotation
    from headrace.models.paged import PagedContext
    from headrace.models.quantized import Fp8Ops, QuantizedRows, quantize_rows, quantize_together, to_float8
    from headrace.models.quantized_fused import FusedFp8Ops
    from headrace.models.ragged import Ragged, has_kernel, ragged_attention
    from headrace.models.rope_config import RopeConfig
    from headrace.models.shapes import parameter_count, parameter_shapes
    from headrace.models.trained import TrainedOps
    from headrace.models.transformer import CausalLM

_HOME = {
    "AdaptedOps": "adapted",
    "Stack": "adapted",
    "AttentionContext": "attention",
    "CacheContext": "attention",
    "CachedContext": "attention",
    "PackedContext": "attention",
    "causal_attention": "attention",
    "group_by_length": "attention",
    "masked_attention": "attention",
    "dtype_on": "device",
    "upload": "device",
    "Said": "divergence",
    "divergences": "divergence",
    "TrainedOps": "trained",
    "PagedContext": "paged",
    "ModelConfig": "config",
    "ExactOps": "exact",
    "InvariantContext": "exact_paged",
    "check_folder": "folder",
    "check_policy": "folder",
    "Fp8Ops": "quantized",
    "FusedFp8Ops": "quantized_fused",
    "FusedOps": "fused",
    "QuantizedRows": "quantized",
    "quantize_rows": "quantized",
    "quantize_together": "quantized",
    "to_float8": "quantized",
    "join": "joined",
    "joined_names": "joined",
    "side_by_side": "joined",
    "load_model": "io",
    "random_model": "io",
    "refuse_non_finite": "io",
    "save_model": "io",
    "stored_dtype": "io",
    "Support": "logprobs",
    "token_logprobs": "logprobs",
    "Ops": "ops",
    "ReferenceOps": "ops",
    "Rotation": "ops",
    "Ragged": "ragged",
    "has_kernel": "ragged",
    "ragged_attention": "ragged",
    "RopeConfig": "rope_config",
    "parameter_count": "shapes",
    "parameter_shapes": "shapes",
    "CausalLM": "transformer",
}

__all__ = [
    "AdaptedOps",
    "AttentionContext",
    "CacheContext",
    "CachedContext",
    "CausalLM",
    "ExactOps",
    "Fp8Ops",
    "FusedFp8Ops",
    "FusedOps",
    "InvariantContext",
    "ModelConfig",
    "Ops",
    "PackedContext",
    "PagedContext",
    "QuantizedRows",
    "Ragged",
    "ReferenceOps",
    "RopeConfig",
    "Rotation",
    "Said",
    "Stack",
    "Support",
    "TrainedOps",
    "causal_attention",
    "check_folder",
    "check_policy",
    "divergences",
    "dtype_on",
    "group_by_length",
    "has_kernel",
    "join",
    "joined_names",
    "load_model",
    "masked_attention",
    "parameter_count",
    "parameter_shapes",
    "quantize_rows",
    "quantize_together",
    "ragged_attention",
    "random_model",
    "refuse_non_finite",
    "save_model",
    "side_by_side",
    "stored_dtype",
    "to_float8",
    "token_logprobs",
    "upload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
