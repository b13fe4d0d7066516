"""Which runner carries out the steps."""

from __future__ import annotations

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.kv import KvCache
from headrace.engine.native.plan import Runner
from headrace.engine.native.reference import ReferenceRunner
from headrace.engine.native.served import ServedWeights
from headrace.engine.native.slots import Slots
from headrace.errors import ConfigError
from headrace.models import AdaptedOps, CausalLM, ExactOps, Fp8Ops


def open_runner(
    model: CausalLM, served: ServedWeights, kv: KvCache, slots: Slots, config: NativeEngineConfig
) -> Runner:
    """CUDA graphs and Triton kernels on a GPU, plain PyTorch elsewhere."""
    if kv.device.type == "cuda" and config.kernels == "fused":
        from headrace.engine.native.graphs import GraphRunner

        return GraphRunner(model, served, kv, slots, config)
    exact = config.numerics == "exact"
    if exact and kv.device.type == "cuda":
        raise ConfigError(
            'on CUDA engine.numerics = "exact" needs engine.kernels = "fused"', config.kernels, "leave it out"
        )
    ops, quantized = model.ops, served.quantized
    if exact:
        ops = ExactOps()
    elif quantized is not None or config.kv_dtype == "fp8":
        ops = Fp8Ops(quantized.rows_of if quantized else None, kv=config.kv_dtype == "fp8")
    adapters = served.adapters
    adapted = None if adapters is None else AdaptedOps(ops, adapters.stack_of, adapters.scales)
    return ReferenceRunner(model.use(adapted or ops), kv, slots, exact=exact, adapted=adapted)
