"""`headrace bench train`: training steps on this machine.

    speed.py       whole steps beside the device's arithmetic and beside transformers
    prefix.py      a group's shared prompt computed once, beside the same step without

Each part can be run alone: `--set parts=prefix`. On a CPU the shape is `tiny` unless others are asked for.
"""

from __future__ import annotations

from typing import Any, Literal

from headrace.bench import result
from headrace.bench.engine import drive
from headrace.bench.train import prefix, speed
from headrace.errors import ConfigError

PARTS = ("step", "prefix")


def run(
    parts: str = ",".join(PARTS),
    shapes: str = "",
    device: str = "auto",
    kernels: Literal["fused", "reference"] = "fused",
    rounds: int = prefix.ROUNDS,
) -> dict[str, Any]:
    """Those of the parts that are asked for. `kernels` is the trainer's; `rounds` are of the prefix part."""
    wanted = [part.strip() for part in str(parts).split(",")]
    for part in wanted:
        if part not in PARTS:
            raise ConfigError("a part of bench train is one of those known", part, f"known: {', '.join(PARTS)}")
    on_gpu = drive.device_of(device).type == "cuda"
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    if "step" in wanted:
        for shape in (shapes or ("0.6b,8b" if on_gpu else "tiny")).split(","):
            row = speed.measure(shape.strip(), device, kernels=kernels)
            rows.append(row)
            named = {"mfu": row["mfu"], "peak_gib": row["peak_gib"]}
            named["over_transformers_eager"] = row.get("over_transformers")
            figures |= {f"{name}_{shape.strip()}": value for name, value in named.items() if value is not None}
    if "prefix" in wanted:
        one = prefix.Work()
        if on_gpu:
            for shape in ("0.6b", "8b"):
                rows.append(prefix.measure(device, work=one, shape=shape, rounds=rounds, kernels=kernels))
                figures[f"prefix_tree_speedup_one_group_{shape}"] = rows[-1]["speedup"]
        work = prefix.MANY if on_gpu else one
        rows.append(prefix.measure(device, work=work, rounds=rounds, kernels=kernels))
        figures["prefix_tree_speedup"] = rows[-1]["speedup"]
        figures["prefix_tree_token_saving"] = rows[-1]["token_saving"]
    return result("train", rows, figures)
