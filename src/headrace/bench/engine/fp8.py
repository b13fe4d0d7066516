"""What FP8 gains: a decode step with its cache, its projections or both in 8 bits, beside one with neither.

What it costs in log-probs is asked of a trained model (`agreement.ask`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from headrace.bench.engine import decode, drive
from headrace.bench.engine.limit import kv_bytes, weight_bytes
from headrace.bench.engine.shapes import DTYPE, config_of
from headrace.models import ModelConfig, parameter_shapes

KINDS: dict[str, dict[str, Any]] = {
    "fp8_kv": {"kv_dtype": "fp8"},
    "fp8_weights": {"weight_dtype": "fp8"},
    "fp8_both": {"kv_dtype": "fp8", "weight_dtype": "fp8"},
}
"""The engine's settings, by what their figures are called."""
ITEM, SCALE = torch.float8_e4m3fn.itemsize, torch.float32.itemsize


def measure(
    shape: str, device: torch.device, *, plain: dict[str, Any] | None = None, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(rows, figures) of the shape's headline point. `plain` is decode's row of it, measured here if not given;
    `options` are decode's."""
    point = decode.HEADLINE[shape]
    if plain is None:
        [plain] = decode.measure(shape, device, points=[point], **options)
        drive.free_memory()
    rows, figures = [plain | {"part": "fp8", "kind": "bf16", "speedup": 1.0}], {}
    for kind, settings in KINDS.items():
        drive.say(f"{kind} decode {shape} …")
        [row] = decode.measure(shape, device, points=[point], **settings, **options)
        drive.free_memory()
        read = step_bytes(config_of(shape), point.sequences * row["context_mean"], **settings)
        limit_ms = read / row["bandwidth_gb_s"] / 1e6
        speedup = plain["ms_per_step"] / row["ms_per_step"]
        better = {"limit_ms": limit_ms, "limit_frac": limit_ms / row["ms_per_step"], "speedup": speedup}
        rows.append(drive.kept(row | {"part": "fp8", "kind": kind} | better))
        figures[f"{kind}_speedup_{shape}"] = speedup
    return rows, figures


def step_bytes(config: ModelConfig, tokens: float, *, kv_dtype: str = "same", weight_dtype: str = "same") -> float:
    """What a decode step over so many cached tokens reads: weights, with their scales, and keys and values."""
    kv = kv_bytes(config, tokens, ITEM if kv_dtype == "fp8" else DTYPE.itemsize)
    return weight_bytes(config) - (_saved(config) if weight_dtype == "fp8" else 0) + kv


def _saved(config: ModelConfig) -> int:
    """Bytes that the projections in float8, each row with its scale, take less."""
    shapes = [shape for name, shape in parameter_shapes(config).items() if name.endswith("_proj.weight")]
    return sum(math.prod(shape) * (DTYPE.itemsize - ITEM) - shape[0] * SCALE for shape in shapes)
