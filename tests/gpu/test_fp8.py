"""FP8 cache and projections on a GPU: the kernels beside their definition, and an engine under swaps and sleep."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine_builders import finish
from gpu_builders import publish

from headrace.audit.kept import replay_ops, shaken
from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.kv import FLOAT8, KvCache
from headrace.kernels.quantize import quantize_rows as quantize_by_kernel
from headrace.kernels.rotate import rotate, rotate_and_write
from headrace.models import (
    CausalLM,
    Fp8Ops,
    FusedFp8Ops,
    ModelConfig,
    Rotation,
    quantize_rows,
    quantize_together,
    random_model,
    to_float8,
)
from headrace.records import Turn

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DTYPE = torch.bfloat16
MODEL = ModelConfig(
    family="qwen2",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    qkv_bias=True,
    initializer_range=0.1,
)
KV, WEIGHTS = {"kv_dtype": "fp8"}, {"weight_dtype": "fp8"}
KINDS = [KV, WEIGHTS, KV | WEIGHTS]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.dtype == expected.dtype == FLOAT8
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


# ── Kernels ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 16), (3, 80), (257, 1024), (64, 12288), (5, 25600)])
def test_the_kernel_quantises_as_the_reference_bit_for_bit(size, dtype):
    x = draw(*size, dtype=dtype)
    x[0] = 0
    values, scales = quantize_by_kernel(x)
    expected = quantize_rows(x)
    assert torch.equal(scales, expected.scales)
    assert same_bits(values, expected.values)


def test_what_is_out_of_range_saturates_in_the_cache():
    q, k, v = draw(4, 4, 64), 200 * draw(4, 2, 64, seed=1), 1e4 * draw(4, 2, 64, seed=2)
    cos, sin = (torch.full((4, 1, 64), value, device=CUDA, dtype=DTYPE) for value in (1.0, 0.0))
    still = Rotation(cos, sin, None, None, 0.0)
    keys, values = (torch.zeros(2, 2, 4, 64, dtype=FLOAT8, device=CUDA) for _ in range(2))
    rows = torch.tensor([3, 1, 6, 4], device=CUDA)
    rotate_and_write(q, k, v, still, keys, values, rows)
    rotated = rotate(q, k, still)[1]
    for cache_gnsd, new_tgd in ((keys, rotated), (values, v)):
        found = cache_gnsd.flatten(1, 2).view(torch.uint8)[:, rows].view(FLOAT8)
        assert same_bits(found, to_float8(new_tgd).transpose(0, 1))
    assert values.float().abs().max() == 448


def test_pages_of_float8_are_copied():
    kv = KvCache(MODEL, 8, 16, DTYPE, CUDA, FLOAT8)
    for layer in range(MODEL.num_layers):
        for tensor in kv.layer(layer):
            tensor.view(torch.uint8).copy_(torch.arange(tensor.numel(), device=CUDA).view_as(tensor) % 97)
    before = [tensor.view(torch.uint8).clone() for layer in range(3) for tensor in kv.layer(layer)]
    kv.copy([2, 5], [6, 0])
    for tensor, old in zip((t for layer in range(3) for t in kv.layer(layer)), before, strict=True):
        bits = tensor.view(torch.uint8)
        assert torch.equal(bits[:, 6], old[:, 2])
        assert torch.equal(bits[:, 0], old[:, 5])
        assert torch.equal(bits[:, 1], old[:, 1])


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_projections_are_the_definition_s_within_bfloat16_s_rounding(tokens):
    attention = random_model(MODEL, 0, dtype=DTYPE, device="cuda").requires_grad_(False).model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    for i, layer in enumerate(layers):
        layer.bias.copy_(draw(*layer.bias.shape, seed=i))
    x = draw(tokens, MODEL.hidden_size)
    fused, reference = FusedFp8Ops(quantize_together), Fp8Ops(quantize_together)
    for found, expected in zip(fused.linears(x, layers), reference.linears(x, layers), strict=True):
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    found = fused.branch(x, attention.o_proj.weight, None)
    torch.testing.assert_close(found, reference.branch(x, attention.o_proj.weight, None), atol=0.02, rtol=0.02)


# ── The engine ───────────────────────────────────────────────────────────────────────────────────────────


def model_of(version: int) -> CausalLM:
    return random_model(MODEL, 100 + version, dtype=DTYPE, device="cuda")


@cache
def emulating(version: int, kv: str, weights: str) -> CausalLM:
    ops = replay_ops(NativeEngineConfig(kv_dtype=kv, weight_dtype=weights))
    return model_of(version).use(ops) if ops is not None else model_of(version)


def engine_of(kind: dict[str, Any], **settings: Any) -> NativeEngine:
    config = NativeEngineConfig(
        device="cuda", dtype="bfloat16", max_context=128, max_running=64, prefill_tokens=512, **kind, **settings
    )
    return NativeEngine(model_of(0), config, version=0)


def add(engine: NativeEngine, count: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(count):
        context = rng.integers(0, MODEL.vocab_size, rng.integers(4, 40)).astype(np.int32)
        engine.add(SampleRequest(id=i, context=context, max_tokens=60, seed=i))


def replays(turns: list[Turn], models: Callable[[int], CausalLM]) -> np.ndarray:
    return np.concatenate([replay_logprobs(models, turn.context, turn) for turn in turns])


def assert_replays(turns: dict[int, Turn], models: Callable[[int], CausalLM]) -> None:
    """Log-probs are off by no more than one rounding moves them, and by much less than a wrong version's are."""
    apart = abs(replays(list(turns.values()), models) - np.concatenate([turn.logprobs for turn in turns.values()]))
    assert np.isfinite(apart).all()
    some = list(turns.values())[::6]
    right, recorded = replays(some, models), np.concatenate([turn.logprobs for turn in some])
    moved = abs(replays(some, cache(lambda version: shaken(models(version), seed=version))) - right)
    assert apart.mean() < moved.mean()
    assert np.median(apart) < np.median(moved)
    wrong = abs(replays(some, lambda version: models(version + 1)) - recorded)
    assert 4 * apart.mean() < wrong.mean()


def of_kind(kind: dict[str, Any]) -> Callable[[int], CausalLM]:
    return lambda version: emulating(version, kind.get("kv_dtype", "same"), kind.get("weight_dtype", "same"))


@pytest.mark.parametrize("standby", [True, False])
@pytest.mark.parametrize("interrupt", ["keep", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_sampled_by_graphs_replay_through_swaps(kind, interrupt, standby):
    engine = engine_of(kind, standby=standby)
    add(engine, 128)
    turns: dict[int, Turn] = {}
    steps = 0
    while engine.has_work:
        turns.update(engine.step())
        steps += 1
        if steps % 30 == 0 and engine.version < 3:
            publish(engine, engine.version + 1, model_of(engine.version + 1), interrupt)
    assert {int(v) for turn in turns.values() for v in turn.versions} == {0, 1, 2, 3}
    assert sum(len(turn.tokens) for turn in turns.values()) == 128 * 60
    assert_replays(turns, of_kind(kind))


def test_a_partial_swap_reaches_the_quantised_projections():
    engine = engine_of(WEIGHTS)
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(3) for part in ("up", "down")]
    for name in names:
        engine.standby[name].zero_()
    torch.cuda.synchronize()
    engine.swap(1, only=names)
    add(engine, 32)
    turns = finish(engine)
    model = model_of(0).use(Fp8Ops(quantize_together))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.zero_()
    other = emulating(0, "same", "fp8")
    assert_replays(turns, lambda version: model if version == 1 else other)


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_it_sleeps_wakes_and_goes_on_over_the_same_graphs(kind, keep_weights):
    engine = engine_of(kind)
    add(engine, 64)
    turns: dict[int, Turn] = {}
    for step in range(60):
        if step in (15, 35):
            engine.sleep(keep_weights=keep_weights)
            if step == 35 or not keep_weights:
                publish(engine, engine.version + 1, model_of(engine.version + 1))
            engine.wake()
        turns.update(engine.step())
    turns |= finish(engine)
    assert len(turns) == 64
    assert_replays(turns, of_kind(kind))


def test_a_float8_cache_takes_half_of_the_memory_of_a_bfloat16_one():
    sizes = [KvCache(MODEL, 64, 64, DTYPE, CUDA, stored)._block.size for stored in (FLOAT8, None)]
    assert sizes[1] == 2 * sizes[0]
