"""Which runner carries out the steps."""

from __future__ import annotations

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.kv import KvCache
from headrace.engine.native.plan import Runner
from headrace.engine.native.quantized import QuantizedWeights
from headrace.engine.native.reference import ReferenceRunner
from headrace.engine.native.slots import Slots
from headrace.engine.native.weights import Weights
from headrace.errors import ConfigError
from headrace.models import CausalLM, ExactOps, Fp8Ops


def open_runner(
    model: CausalLM,
    weights: Weights,
    kv: KvCache,
    slots: Slots,
    config: NativeEngineConfig,
    *,
    quantized: QuantizedWeights | None = None,
) -> Runner:
    """CUDA graphs and Triton kernels on a GPU, plain PyTorch elsewhere. `quantized`: the projections, where FP8."""
    if weights.device.type == "cuda" and config.kernels == "fused":
        from headrace.engine.native.graphs import GraphRunner

        return GraphRunner(model, weights, kv, slots, config, quantized=quantized)
    exact = config.numerics == "exact"
    if exact and weights.device.type == "cuda":
        raise ConfigError(
            'on CUDA engine.numerics = "exact" needs engine.kernels = "fused"', config.kernels, "leave it out"
        )
    if exact:
        model.use(ExactOps())
    elif quantized is not None or config.kv_dtype == "fp8":
        model.use(Fp8Ops(quantized.rows_of if quantized else None, kv=config.kv_dtype == "fp8"))
    return ReferenceRunner(model, kv, slots, exact=exact)
