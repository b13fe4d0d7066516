"""FP8 cache and projections, emulated on the CPU: what is stored, what replays, what follows a swap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import engine_builders
import numpy as np
import pytest
import torch
from engine_builders import (
    MODEL,
    drive,
    fill_standby,
    finish,
    make_engine,
    publish,
    request,
    requests,
    with_samplings,
)

from headrace.audit.kept import replay_ops
from headrace.audit.recompute import replay_logprobs
from headrace.audit.tolerance import tolerance_of
from headrace.engine.base import ScoreRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.engine.native.kv import FLOAT8, KvCache
from headrace.engine.native.quantized import QuantizedWeights, check_fp8, product_names
from headrace.engine.native.weights import Weights
from headrace.errors import ConfigError
from headrace.models import CausalLM, Fp8Ops, quantize_rows, quantize_together, random_model
from headrace.records import Turn

CPU = torch.device("cpu")
KV, WEIGHTS = {"kv_dtype": "fp8"}, {"weight_dtype": "fp8"}
KINDS = [KV, WEIGHTS, KV | WEIGHTS]
ROUNDING = 1e-4


@cache
def version_of(number: int, kv: str, weights: str) -> CausalLM:
    ops = replay_ops(NativeEngineConfig(kv_dtype=kv, weight_dtype=weights))
    assert ops is not None
    return random_model(MODEL, seed=1000 + number).use(ops)


def assert_replays(
    turns: dict[int, Turn], kind: dict[str, Any], models: Callable[[int], CausalLM] | None = None
) -> None:
    """By the emulation. A value between two float8 numbers may be rounded to either, which moves few tokens."""

    def emulated(version: int) -> CausalLM:
        return version_of(version, kind.get("kv_dtype", "same"), kind.get("weight_dtype", "same"))

    tolerance = tolerance_of(NativeEngineConfig(**kind))
    apart = [
        np.abs(replay_logprobs(models or emulated, turn.context, turn) - turn.logprobs) for turn in turns.values()
    ]
    assert [tolerance.broken_at(one) for one in apart] == [None] * len(apart)
    assert (np.concatenate(apart) > ROUNDING).mean() < 0.05


# ── The cache ────────────────────────────────────────────────────────────────────────────────────────────


def small_cache(stored: torch.dtype | None = FLOAT8, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache(MODEL, 8, 4, dtype, CPU, stored)


def written(kv: KvCache, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Four tokens on each of these pages of layer 1, some of them out of float8's range."""
    generator = torch.Generator().manual_seed(0)
    tokens = 4 * len(pages)
    k, v = (torch.randn(tokens, 2, 8, generator=generator) for _ in range(2))
    v[1] *= 1e4
    rows = kv.row_index(np.repeat(pages, 4), np.tile(np.arange(4), len(pages)))
    kv.write(1, rows, k.to(kv.dtype), v.to(kv.dtype))
    return k, v


def gathered(kv: KvCache, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, G, D) of one sequence on these pages."""
    index = kv.page_index(np.array([pages]))
    keys, values = kv.gather_keys(1, index, 1), kv.gather_values(1, index, 1)
    return keys[:, 0].transpose(0, 1), values[:, 0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_comes_back_rounded_to_float8_and_saturated(dtype):
    kv = small_cache(dtype=dtype)
    k, v = written(kv, [5, 2])
    keys, values = gathered(kv, [5, 2])
    assert keys.dtype == values.dtype == dtype
    for found, given in ((keys, k), (values, v)):
        assert torch.equal(found, given.to(dtype).clamp(-448, 448).to(FLOAT8).to(dtype))
    assert values.abs().max() == 448
    assert kv.layer(1)[0].dtype == FLOAT8


def test_whole_pages_are_copied_bit_for_bit():
    kv = small_cache()
    written(kv, [5, 2])
    kv.copy([5, 2], [1, 7])
    for layer in kv.layer(1):
        assert layer.view(torch.uint8).any()
    first, second = gathered(kv, [1]), gathered(kv, [5])
    assert torch.equal(first[0], second[0])
    moved = small_cache()
    written(moved, [5, 7])
    assert torch.equal(gathered(kv, [7])[1], gathered(moved, [7])[1])


def test_it_takes_a_byte_for_each_number():
    config = NativeEngineConfig(max_context=16, max_running=4, **KV)
    kv = KvCache.sized(MODEL, config, torch.float32, CPU)
    assert (kv.dtype, kv.stored) == (torch.float32, FLOAT8)
    assert KvCache.bytes_per_token(MODEL, kv.stored) == 2 * 2 * 2 * 8
    assert sum(tensor.nbytes for layer in range(2) for tensor in kv.layer(layer)) == 64 * (64 + kv.page_size)
    plain = KvCache.sized(MODEL, NativeEngineConfig(max_context=16, max_running=4), torch.float32, CPU)
    assert plain.stored == torch.float32


# ── The projections ──────────────────────────────────────────────────────────────────────────────────────


def quantized_of(model: CausalLM) -> tuple[Weights, QuantizedWeights]:
    model.requires_grad_(False)
    return Weights(model), QuantizedWeights(model, fused=False)


def assert_follows(quantized: QuantizedWeights, model: CausalLM, names: set[str] | None = None) -> None:
    """Every product, or those that have one of these names, is quantised from what the model has now."""
    parameters = dict(model.named_parameters())
    for product in product_names(model.config):
        expected = quantize_rows(torch.cat([parameters[name] for name in product]))
        found = quantized.rows_of(tuple(parameters[name] for name in product))
        assert found is not None
        same = torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert same == (names is None or bool(names & set(product))), product


def test_every_projection_has_rows_and_nothing_else_has():
    model = random_model(MODEL, 0)
    weights, quantized = quantized_of(model)
    assert_follows(quantized, model)
    for name, parameter in model.named_parameters():
        rows = quantized.rows_of((parameter,))
        assert (rows is not None) == name.endswith("_proj.weight"), name
        if rows is not None:
            assert torch.equal(rows.scales, quantize_rows(parameter).scales)
    assert weights.complete


def test_it_follows_a_flip_at_the_same_addresses():
    model = random_model(MODEL, 0)
    weights, quantized = quantized_of(model)

    def addresses() -> list[int]:
        found = [quantized.rows_of((p,)) for name, p in model.named_parameters() if name.endswith("_proj.weight")]
        return [tensor.data_ptr() for rows in found if rows is not None for tensor in rows]

    before = addresses()
    for seed in (1, 2):
        new = random_model(MODEL, seed).state_dict()
        for name, buffer in weights.standby.items():
            buffer.copy_(new[name])
        weights.flip()
        assert_follows(quantized, model, set())
        quantized.refresh()
        assert_follows(quantized, model)
    assert addresses() == before


def test_of_single_parameters_only_their_products_are_made_anew():
    model = random_model(MODEL, 0)
    _, quantized = quantized_of(model)
    for parameter in model.parameters():
        parameter.mul_(-1)
    changed = {"model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"}
    quantized.refresh(changed)
    assert_follows(quantized, model, changed)


def test_without_memory_nothing_is_made_and_restoring_makes_all_of_it():
    model = random_model(MODEL, 0)
    _, quantized = quantized_of(model)
    quantized.release()
    for parameter in model.parameters():
        parameter.mul_(2)
    quantized.refresh()
    quantized.restore()
    assert_follows(quantized, model)


# ── The engine ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_replay_through_the_emulation_and_not_without_it(kind):
    turns = drive(make_engine(config=kind), with_samplings(requests(60, seed=0)))
    assert_replays(turns, kind)
    plain = np.concatenate(
        [
            np.abs(replay_logprobs(engine_builders.version_of, turn.context, turn) - turn.logprobs)
            for turn in turns.values()
        ]
    )
    assert np.median(plain) > 100 * ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_follow_every_swap_under_preemption(kind):
    engine = make_engine(config={"cache_tokens": 400, "max_context": 96, "prefill_tokens": 64, **kind})

    def swap_now_and_then(step: int) -> None:
        if step % 23 == 22:
            publish(engine, engine.version + 1, "keep" if engine.version % 3 else "recompute")

    turns = drive(engine, requests(60, seed=3), swap_now_and_then)
    causes = [event.cause for turn in turns.values() for event in turn.lineage]
    assert min(causes.count("preempt"), causes.count("swap")) > 10
    assert_replays(turns, kind)


@pytest.mark.parametrize("standby", [True, False])
def test_a_partial_swap_quantises_what_it_changed(standby):
    engine = make_engine(config={"standby": standby, **WEIGHTS})
    names = [f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(2)]
    fill_standby(engine, 1)
    engine.swap(1, only=names)
    turns = drive(engine, [request(i, range(i + 3), 20) for i in range(6)])
    mixed = random_model(MODEL, seed=1000).use(Fp8Ops(quantize_together))
    new = dict(engine_builders.version_of(1).named_parameters())
    with torch.no_grad():
        for name, parameter in mixed.named_parameters():
            if name in names:
                parameter.copy_(new[name])
    assert_replays(turns, WEIGHTS, lambda version: mixed)


@pytest.mark.parametrize("keep_weights", [True, False])
@pytest.mark.parametrize("version", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_it_sleeps_and_wakes(kind, version, keep_weights):
    if version is None and not keep_weights:
        version = 5
    engine = make_engine(config=kind)
    wanted = requests(12, seed=3)
    for one in wanted:
        engine.add(one)
    turns: dict[int, Turn] = {}
    for _ in range(10):
        turns.update(engine.step())
    engine.sleep(keep_weights=keep_weights)
    if version is not None:
        publish(engine, version, "keep")
    engine.wake()
    turns |= finish(engine)
    assert len(turns) == 12
    assert {int(v) for turn in turns.values() for v in turn.versions} == {0, version or 0}
    assert_replays(turns, kind)
    publish(engine, 9, "keep")
    assert_replays(drive(engine, requests(4, seed=9)), kind)


def test_given_tokens_are_scored_as_they_were_sampled_and_forks_share_pages():
    engine = make_engine(config=KV | WEIGHTS)
    turn = drive(engine, [request(0, range(12), 9, hold=True)])[0]
    engine.score(ScoreRequest(id=1, context=turn.context, tokens=turn.tokens))
    engine.add(request(2, [], 6, fork_of=0, fork_at=14))
    ended = finish(engine)
    assert np.median(np.abs(ended[1].logprobs - turn.logprobs)) < ROUNDING
    assert_replays({2: ended[2]}, KV | WEIGHTS)
    assert engine.pages_copied > 0


# ── Refusals ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [KV, WEIGHTS])
def test_an_exact_engine_is_not_fp8(kind):
    [key] = kind
    with pytest.raises(ConfigError, match=rf'numerics = "exact" needs engine\.{key} = "same".*fp8.*leave engine'):
        NativeEngineConfig(numerics="exact", **kind).check()
    NativeEngineConfig(**kind).check()


def pretend_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    return torch.device("cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_a_card_that_does_not_know_fp8_is_refused_by_its_name(monkeypatch, kind):
    card = pretend_card(monkeypatch, (8, 0))
    with pytest.raises(ConfigError, match=r"needs a card of compute capability 8\.9.*NVIDIA A100, 8\.0.*same"):
        check_fp8(NativeEngineConfig(**kind), MODEL, torch.bfloat16, card)
    check_fp8(NativeEngineConfig(), MODEL, torch.bfloat16, card)


def test_on_cuda_fp8_projections_want_bfloat16_and_sizes_of_sixteens(monkeypatch):
    card = pretend_card(monkeypatch, (9, 0))
    check_fp8(NativeEngineConfig(**WEIGHTS), MODEL, torch.bfloat16, card)
    check_fp8(NativeEngineConfig(**KV), MODEL, torch.float32, card)
    check_fp8(NativeEngineConfig(kernels="reference", **WEIGHTS), MODEL, torch.float32, card)
    with pytest.raises(ConfigError, match=r"needs engine\.dtype = \"bfloat16\".*float32"):
        check_fp8(NativeEngineConfig(**WEIGHTS), MODEL, torch.float32, card)
    with pytest.raises(ConfigError, match=r"multiples of 16.*40"):
        check_fp8(NativeEngineConfig(**WEIGHTS), replace(MODEL, intermediate_size=40), torch.bfloat16, card)


def test_on_the_cpu_every_kind_is_emulated():
    for kind in KINDS:
        engine = NativeEngine(random_model(MODEL, 0), NativeEngineConfig(max_context=32, **kind), version=0)
        assert len(drive(engine, [request(0)])[0].tokens) == 8
