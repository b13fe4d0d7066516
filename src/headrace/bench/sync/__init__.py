"""`headrace bench sync`: payloads, transports and what publication costs training and generation.

memory.py       full weights through shared memory beside this machine's memcpy
collective.py   buckets over sockets beside gloo's broadcast of each parameter
delta.py        what changed: bytes beside their entropy in a real run; coding
adapter.py      an adapter alone: its bytes; on a GPU how soon an engine under load serves it
steps.py        training steps with a publication after each beside steps without
ipc.py          full weights through CUDA IPC beside one copy on the device (GPU)
lesson.py       the task and model of the runs
served.py       an engine in a process of its own, kept busy

Each part can be run alone: `--set parts=memory,delta`. On a small machine: `--set shape=tiny`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from headrace.bench import result
from headrace.errors import ConfigError

PARTS = ("memory", "collective", "delta", "adapter", "steps", "ipc")
HOME, HOME_ON_GPU = "0.6b", "8b"
"""Figures of another shape carry its name."""
BY_GPU_SHAPE = ("adapter, bytes", "adapter, live", "ipc")
Measured = tuple[list[dict[str, Any]], dict[str, float]]


def run(
    parts: str = ",".join(PARTS),
    shape: str = HOME,
    gpu_shape: str = HOME_ON_GPU,
    device: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Those of the parts that are asked for, one after another; names are separated by commas.

    `shape` is of the weights that travel on the CPU, `gpu_shape` of those that travel on a GPU and of the model
    whose adapter is measured. With `shape` "tiny" the runs are tiny too. What needs a GPU is left out where the
    device is the CPU.
    """
    wanted = _names(parts)
    from headrace.bench.engine import drive
    from headrace.bench.engine.shapes import config_of

    config_of(shape), config_of(gpu_shape)
    on_gpu = drive.device_of(device).type == "cuda"
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    left_out: list[str] = []
    for name, needs_gpu, measure in _plan(shape, gpu_shape, seed):
        if name.split(",")[0] not in wanted:
            continue
        if needs_gpu and not on_gpu:
            left_out.append(name)
            continue
        found, shown = measure()
        rows += found
        size, home = (gpu_shape, HOME_ON_GPU) if name in BY_GPU_SHAPE else (shape, HOME)
        figures |= {_figure(figure, size, home): value for figure, value in shown.items()}
        drive.free_memory()
    if left_out:
        drive.say(f"left out, for want of a GPU: {'; '.join(left_out)}")
        rows.append({"part": "left out", "needs a GPU": "; ".join(left_out)})
    return result("sync", rows, figures)


def _plan(shape: str, gpu_shape: str, seed: int) -> list[tuple[str, bool, Callable[[], Measured]]]:
    """(what is measured, whether it needs a GPU, how), each imported when its turn comes: the workers of the runs
    import this package, and have no use for torch."""
    tiny = shape == "tiny"

    def part(name: str) -> Any:
        return importlib.import_module(f"{__name__}.{name}")

    def steps(size: str, device: str) -> Measured:
        measured: Measured = part("steps").measure(getattr(part("steps"), size), device, seed)
        return measured

    return [
        ("memory", False, lambda: part("memory").measure(shape, seed)),
        ("collective", False, lambda: part("collective").measure(shape)),
        ("delta", False, lambda: part("delta").measure(shape, part("delta").TINY if tiny else None, seed)),
        ("adapter, bytes", False, lambda: part("adapter").measure_bytes(gpu_shape, seed=seed)),
        ("adapter, live", True, lambda: part("adapter").measure_live(gpu_shape, seed=seed)),
        ("steps, quickstart", False, lambda: steps("TINY" if tiny else "QUICKSTART", "cpu")),
        ("steps, on a GPU", True, lambda: steps("TINY_ON_GPU" if tiny else "ON_GPU", "cuda")),
        ("ipc", True, lambda: part("ipc").measure(gpu_shape, seed)),
    ]


def _figure(name: str, shape: str, home: str) -> str:
    return name if shape == home or name.endswith(f"_{shape}") else f"{name}_{shape}"


def _names(text: str) -> list[str]:
    names = [name.strip() for name in str(text).split(",")]
    for name in names:
        if name not in PARTS:
            raise ConfigError("a part of bench sync is one of those known", name, f"known: {', '.join(PARTS)}")
    return names
