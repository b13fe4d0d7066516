"""An engine's needs: both sets of weights, its cache, graphs, and one step's tensors."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.run import RunConfig
from headrace.memory_plan.activations import inference_bytes
from headrace.memory_plan.constants import (
    DEVICE_CONTEXT,
    ENGINE_WITH_TORCH,
    GRAPH_BYTES_PER_LAYER,
    HOST_WITH_CUDA,
)
from headrace.memory_plan.needs import CONTEXT, Machine, Models, Need, Where, itemsize
from headrace.models.config import ModelConfig
from headrace.models.shapes import parameter_count, parameter_shapes

PAGE_SIZE = {"host": 16, "device": 64}
"""Where the configuration has none (`engine.native.kv.DEFAULT_PAGE_SIZE`)."""


def engine_names(config: RunConfig) -> list[str]:
    names = [f"engine-{i}" for i in range(config.engine.count)]
    return [*names, *(["engine-eval"] if config.evaluation.by_name else [])]


def is_on_device(config: RunConfig, machine: Machine) -> bool:
    return machine.has_device and config.engine.device != "cpu"


def has_standby(config: RunConfig) -> bool:
    """Whether a second set of weights is ever filled: from the start, or by the first whole version."""
    return config.payload != "adapter" or config.engine.standby is True


def cache_token_bytes(config: RunConfig, model: ModelConfig) -> int:
    """Keys and values of one token in all layers (`KvCache.bytes_per_token`)."""
    size = 1 if config.engine.kv_dtype == "fp8" else itemsize(config.engine.dtype)
    return 2 * model.num_layers * model.kv_size * size


def page_size(config: RunConfig, machine: Machine) -> int:
    return config.engine.page_size or PAGE_SIZE["device" if is_on_device(config, machine) else "host"]


def most_cache_tokens(config: RunConfig, machine: Machine) -> int:
    """More than this no engine can use: whole pages for all sequences at full length."""
    pages = -(-config.engine.max_context // page_size(config, machine)) * config.engine.max_running
    return pages * page_size(config, machine)


def cache_bytes(config: RunConfig, model: ModelConfig, machine: Machine, tokens: int) -> int:
    """The last page belongs to nobody (`KvCache`). Plain PyTorch also gathers one layer's keys and values."""
    size = page_size(config, machine)
    whole = (-(-tokens // size) + 1) * size * cache_token_bytes(config, model)
    return whole if is_fused(config, machine) else whole + whole // model.num_layers


def is_fused(config: RunConfig, machine: Machine) -> bool:
    return is_on_device(config, machine) and config.engine.kernels == "fused"


def graph_count(config: RunConfig, machine: Machine) -> int:
    """Batch sizes, once for each set of weights (`engine.native.graphs.buckets`)."""
    if not is_fused(config, machine):
        return 0
    most = config.engine.max_running
    sizes = [
        1,
        2,
        4,
        8,
        *range(16, 64, 8),
        *range(64, 256, 16),
        *range(256, 1024, 32),
        *range(1024, most + 128, 128),
    ]
    return (len([size for size in sizes if size < most]) + 1) * (2 if has_standby(config) else 1)


def engine_needs(
    config: RunConfig, models: Models, machine: Machine, who: str, cache_tokens: int
) -> Iterator[Need]:
    model, engine = models.policy, config.served_engine
    device = is_on_device(config, machine)
    where: Where = "device" if device else "host"
    size, whole = itemsize(engine.dtype), parameter_count(model)

    def need(what: str, amount: int, *, sleeps: bool = True) -> Need:
        return Need(who, where, what, amount, "generating" if sleeps else "always")

    # engine/native/weights.py: two blocks of the whole model.
    yield need("weights", whole * size)
    if has_standby(config):
        yield need("standby weights", whole * size)
    # engine/native/quantized.py: the layers' matrices once more in 8 bits, with a float32 scale for each row.
    if engine.weight_dtype == "fp8":
        matrices = [s for name, s in parameter_shapes(model).items() if len(s) == 2 and ".layers." in name]
        yield need("fp8 copy", sum(rows * (columns + 4) for rows, columns in matrices))
    # engine/native/adapters.py: places for all projections, and as much again for what arrives.
    if engine.max_adapters:
        places = _adapter_place(model, engine.max_adapter_rank) * engine.max_adapters * size
        yield need("adapters", 2 * places)
    yield need("KV cache", cache_bytes(config, model, machine, cache_tokens))
    tokens = min(engine.prefill_tokens, engine.max_running * engine.max_context) + engine.max_running
    yield need("a step", inference_bytes(model, tokens, engine.max_running, size), sleeps=not device)
    if device:
        graphs = graph_count(config, machine) * model.num_layers * GRAPH_BYTES_PER_LAYER
        yield need("CUDA graphs", graphs, sleeps=False)
        yield need(CONTEXT, DEVICE_CONTEXT, sleeps=False)
        yield Need(who, "host", "process", HOST_WITH_CUDA)
        if config.placement == "turns" and config.payload != "full":
            # turns.py keeps weights where a version does not bring all of them; `Weights.release` pins them.
            yield Need(who, "host", "weights of a sleeping engine", whole * size, "training")
    else:
        yield Need(who, "host", "process", ENGINE_WITH_TORCH)


def _adapter_place(model: ModelConfig, rank: int) -> int:
    """Numbers of one adapter of this rank on all projections of all layers."""
    matrices = [s for name, s in parameter_shapes(model).items() if len(s) == 2 and ".layers." in name]
    return sum(rank * (rows + columns) for rows, columns in matrices)
