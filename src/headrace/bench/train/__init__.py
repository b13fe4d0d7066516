"""`headrace bench train`: training steps on this machine.

prefix.py      a group's shared prompt computed once, beside the same step without
"""

from __future__ import annotations

from typing import Any

from headrace.bench import result
from headrace.bench.train import prefix


def run(device: str = "auto", rounds: int = prefix.ROUNDS, seed: int = 0) -> dict[str, Any]:
    """On the CPU a small model in float32, on a GPU the 0.6B shape in bfloat16."""
    row = prefix.measure(device, rounds=rounds, seed=seed)
    figures = {"prefix_tree_speedup": row["speedup"], "prefix_tree_token_saving": row["token_saving"]}
    return result("train", [row], figures)
