"""What no engine can beat: the bytes a decode step must read, over the bandwidth measured in this very run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from headrace.bench.engine.shapes import DTYPE
from headrace.models import ModelConfig, parameter_shapes
from headrace.models.shapes import EMBEDDING

CUDA_BYTES = 4 * 2**30
CPU_BYTES = 2**27
WARM_UP_S = 0.3
"""Of each way to read on a device: clocks take that long to settle."""
SUSTAINED_S = 0.4
"""And that long it is measured: on average, as steps are, not in its luckiest moment."""
ROUNDS = 5
PASSES, CUDA_PASSES = 4, 16
"""Reads of the whole memory in one round: a launch's cost vanishes beside them."""


def weight_bytes(config: ModelConfig, item: int = DTYPE.itemsize) -> int:
    """Weights that every step reads: all but an embedding table of its own, of which it gathers a few rows."""
    shapes = parameter_shapes(config)
    if not config.tie_embeddings:
        del shapes[EMBEDDING]
    return item * sum(math.prod(shape) for shape in shapes.values())


def kv_bytes(config: ModelConfig, tokens: float, item: int = DTYPE.itemsize) -> float:
    """Keys and values of so many cached tokens."""
    return item * 2 * config.num_layers * config.kv_size * tokens


def limit_s(config: ModelConfig, sequences: int, context: float, bandwidth: float) -> float:
    """Seconds of a decode step that only reads its weights and every sequence's whole context, each once.

    `bandwidth` is in bytes a second.
    """
    return (weight_bytes(config) + kv_bytes(config, sequences * context)) / bandwidth


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second: the best of several ways to read memory far larger than any cache, full of noise."""
    size = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    words = torch.empty(size // 4, dtype=torch.int32, device=device)
    words.view(DTYPE).normal_()
    seconds = _cuda_seconds if words.is_cuda else _seconds
    return max(size / seconds(read) for read in _readers(words))


def _readers(words: Tensor) -> list[Callable[[], object]]:
    numbers = words.view(torch.float32)
    readers: list[Callable[[], object]] = [numbers.sum, numbers.amax, words.view(torch.bfloat16).amax]
    if words.is_cuda:
        from headrace.bench.engine.read_kernel import CONFIGURATIONS, read_all

        readers += [partial(read_all, words, *configuration) for configuration in CONFIGURATIONS]
    return readers


def _seconds(read: Callable[[], object]) -> float:
    """Of one read, in the best of several rounds."""
    best = math.inf
    read()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(PASSES):
            read()
        best = min(best, (time.perf_counter() - began) / PASSES)
    return best


def _cuda_seconds(read: Callable[[], object]) -> float:
    """Of one read, by the device's clock, on average over a while once it is warm."""
    _timed(read, WARM_UP_S)
    return _timed(read, SUSTAINED_S)


def _timed(read: Callable[[], object], seconds: float) -> float:
    began, on_device, count = time.perf_counter(), 0.0, 0
    while time.perf_counter() - began < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CUDA_PASSES):
            read()
        end.record()
        end.synchronize()
        on_device, count = on_device + 1e-3 * begin.elapsed_time(end), count + CUDA_PASSES
    return on_device / count
