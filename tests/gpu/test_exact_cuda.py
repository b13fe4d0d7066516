"""numerics = "exact" on a GPU: the same bits whatever the batch, and in the engine as in the trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_builders import drive
from gpu_builders import publish

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.kernels.matmul import linear
from headrace.kernels.rotate import rotate, rotate_and_write
from headrace.models import CausalLM, ExactOps, ModelConfig, PackedContext, ReferenceOps, random_model
from headrace.records import Sampling, Turn

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE = torch.bfloat16
MODEL = ModelConfig(
    family="qwen3",
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    qk_norm=True,
    initializer_range=0.1,
)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(top_k=20),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(min_p=0.05),
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_k=100, top_p=0.95, min_p=0.01),
)
PACKED_TURNS = 16


def model_of(version: int, dtype: torch.dtype = DTYPE) -> CausalLM:
    model = random_model(MODEL, 100 + version, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(DEVICE, dtype)
    return model


def trainer(version: int = 0) -> CausalLM:
    return model_of(version).use(ExactOps())


def exact_engine(**settings: Any) -> NativeEngine:
    settings = {"max_running": 64, "max_context": 320, "prefill_tokens": 1024, **settings}
    config = NativeEngineConfig(device="cuda", dtype="bfloat16", numerics="exact", **settings)
    return NativeEngine(model_of(0), config, version=0)


def wanted(count: int) -> list[SampleRequest]:
    """Groups of three with one prompt, of all samplings."""
    rng, made = np.random.default_rng(1), []
    for id in range(count):
        if id % 3 == 0:
            context = rng.integers(0, MODEL.vocab_size, rng.integers(3, 150)).astype(np.int32)
        sampling, tokens = SAMPLINGS[id % len(SAMPLINGS)], int(rng.integers(40, 160))
        made.append(SampleRequest(id=id, context=context, max_tokens=tokens, seed=id, sampling=sampling))
    return made


@torch.no_grad()
def recomputed(model: CausalLM, turns: list[Turn]) -> list[np.ndarray]:
    """Every sampled token's log-prob, several turns to a packed pass, as training computes them."""
    out = []
    for start in range(0, len(turns), PACKED_TURNS):
        some = turns[start : start + PACKED_TURNS]
        whole = [np.concatenate([turn.context, turn.tokens]) for turn in some]
        tokens_t = torch.from_numpy(np.concatenate(whole).astype(np.int64)).to(DEVICE)
        context = PackedContext([len(one) for one in whole], DEVICE)
        hidden_td = model(tokens_t, context.positions, context)
        end = 0
        for turn, one in zip(some, whole, strict=True):
            first, end = end + len(turn.context), end + len(one)
            support = None
            if turn.support is not None:
                columns = turn.support.ids, turn.support.offsets
                support = tuple(torch.from_numpy(x.astype(np.int64)).to(DEVICE) for x in columns)
            temperature = turn.sampling.temperature or 1.0
            rows, targets = hidden_td[first - 1 : end - 1], tokens_t[first:end]
            scores = model.ops.token_logprobs(rows, model.head_weight, targets, temperature, support)
            out.append(scores[0].cpu().numpy())
    return out


def assert_same_bits(found: Turn, expected: Turn) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


@pytest.fixture(scope="module")
def crowd() -> dict[int, Turn]:
    return drive(exact_engine(), wanted(126))


def test_the_trainer_recomputes_ten_thousand_log_probs_bit_for_bit(crowd):
    turns = list(crowd.values())
    assert sum(len(turn.tokens) for turn in turns) >= 10_000
    assert {turn.sampling.truncates for turn in turns} == {False, True}
    again = recomputed(trainer(), turns)
    unequal = sum(int((turn.logprobs != one).sum()) for turn, one in zip(turns, again, strict=True))
    assert unequal == 0


def test_a_request_alone_gives_the_same_bits_as_in_a_crowd(crowd):
    engine = exact_engine()
    for one in wanted(126)[::25]:
        assert_same_bits(drive(engine, [one])[one.id], crowd[one.id])
        engine.drop_prefixes()


@pytest.mark.parametrize(
    "settings",
    [{"cache_tokens": 2048}, {"prefill_tokens": 37, "max_running": 9}, {"page_size": 16}],
    ids=["preempted", "in small chunks", "other pages"],
)
def test_neither_preemption_nor_chunks_nor_pages_change_a_bit(crowd, settings):
    turns = drive(exact_engine(**settings), wanted(42))
    causes = {event.cause for turn in turns.values() for event in turn.lineage}
    assert ("preempt" in causes) == ("cache_tokens" in settings)
    for id, turn in turns.items():
        assert_same_bits(turn, crowd[id])


@pytest.mark.parametrize("interrupt", ["keep", "recompute"])
def test_a_record_replays_through_a_swap_bit_for_bit(interrupt):
    engine, models = exact_engine(), {version: trainer(version) for version in (0, 1)}

    def between(step: int) -> None:
        if step == 40:
            publish(engine, 1, model_of(1), interrupt)

    turns = list(drive(engine, wanted(30), between).values())
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1}
    for turn in turns:
        again = replay_logprobs(models.__getitem__, turn.context, turn)
        np.testing.assert_array_equal(turn.logprobs, again)
    if interrupt == "recompute":
        for version, model in models.items():
            for turn, one in zip(turns, recomputed(model, turns), strict=True):
                under = turn.versions == version
                np.testing.assert_array_equal(turn.logprobs[under], one[under])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_gradients_are_the_reference_s_within_rounding(dtype, most):
    lengths = [70, 1, 130, 64, 9]
    tokens = torch.randint(0, MODEL.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for ops in (ReferenceOps(), ExactOps()):
        model, context = model_of(0, dtype).use(ops), PackedContext(lengths, DEVICE)
        hidden = model(tokens, context.positions, context)
        logprobs, entropy = ops.token_logprobs(hidden, model.head_weight, tokens.roll(-1), 0.9)
        weights = torch.linspace(-1, 1, len(tokens), device=DEVICE)
        (logprobs @ weights + 0.1 * entropy.sum()).backward()
        results.append({name: p.grad.float() for name, p in model.named_parameters()})
    for name, expected in results[0].items():
        apart = float((results[1][name] - expected).norm() / expected.norm())
        assert apart < most, (name, apart)


@pytest.mark.parametrize("columns", [1000, 6144, 24576])
def test_a_row_of_a_product_is_the_same_bits_in_every_tile_and_however_it_is_fetched(columns):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, weight = (torch.randn(n, 4096, generator=generator, device=DEVICE).to(DTYPE) for n in (2048, columns))
    together = linear(x, weight)
    for rows in (1, 64, 65, 300, 512, 513):
        assert torch.equal(linear(x[:rows], weight), together[:rows])
        assert torch.equal(linear(x[-rows:], weight), together[-rows:])
    # No descriptor can be made of rows at odd addresses.
    shifted = torch.empty(2048 * 4096 + 1, dtype=DTYPE, device=DEVICE)[1:].view(2048, 4096).copy_(x)
    assert torch.equal(linear(shifted, weight), together)
    half = columns // 2
    assert torch.equal(linear(x, weight[:half]), together[:, :half])
    assert torch.equal(linear(x, weight[half:]), together[:, half:])


@pytest.mark.parametrize("dim", [64, 80, 128])
def test_rotated_keys_are_the_same_bits_in_a_tensor_and_in_a_cache(dim):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(DTYPE)

    wide = draw(100, 8 * dim)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in wide.split([4 * dim, 2 * dim, 2 * dim], 1))
    turn = (draw(100, 1, dim), draw(100, 1, dim), draw(dim), draw(dim), 1e-6)
    keys, values = torch.zeros(2, 2, 2, 64, dim, dtype=DTYPE, device=DEVICE)
    rows = torch.arange(100, dtype=torch.int32, device=DEVICE)
    q_cached = rotate_and_write(q, k, v, turn, keys, values, rows)
    q_apart, k_apart = rotate(q.contiguous(), k.contiguous(), turn)
    assert torch.equal(q_cached, q_apart)
    assert torch.equal(keys.flatten(1, 2)[:, :100].transpose(0, 1), k_apart)
