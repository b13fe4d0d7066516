"""The sampling kernels, compiled and at the size of a real vocabulary, against the reference and the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_builders import ROUNDING, columns, parameters

from headrace.engine.native.sampling import Parameters, keep, sample
from headrace.kernels.logits import block_stats, pick, score
from headrace.kernels.sampler import Sampler, SamplerInputs
from headrace.kernels.truncation import expand_support, thresholds

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCABULARY = 151_936
DRAWS = 200_000
KINDS = {
    "temperature": (0.8, 0, 1.0, 0.0),
    "top_k": (1.0, 50, 1.0, 0.0),
    "top_p": (1.0, 0, 0.9, 0.0),
    "min_p": (1.0, 0, 1.0, 0.05),
    "all": (1.2, 1000, 0.9, 0.01),
}


def inputs(rows: Parameters, uniform: np.ndarray) -> SamplerInputs:
    slots = torch.arange(len(uniform), dtype=torch.int32, device=DEVICE)
    return SamplerInputs(*columns(rows), torch.from_numpy(uniform).to(DEVICE), slots, torch.zeros_like(slots))


def logits_bv(rows: int, seed: int = 0) -> torch.Tensor:
    """As a model's: a few likely tokens above a broad rest, in bfloat16 with its many ties."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = 2 * torch.randn(rows, VOCABULARY, generator=generator, device=DEVICE)
    logits[:, :: VOCABULARY // 64] += 12
    return logits.bfloat16()


def mixed(rows: int) -> Parameters:
    choices = [*KINDS.values(), (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.95, 0.0), (1.5, 0, 0.99, 0.0)]
    return parameters(*(choices[row % len(choices)] for row in range(rows)))


def probabilities(logits: torch.Tensor, rows: Parameters) -> torch.Tensor:
    divisor = torch.from_numpy(np.where(rows.temperature == 0, 1, rows.temperature).astype(np.float32)).to(DEVICE)
    values = logits.float() / divisor[:, None]
    return torch.softmax(values.double().masked_fill(~keep(values, rows), -math.inf), -1)


def test_a_batch_of_mixed_rows_agrees_with_the_reference():
    logits, rows = logits_bv(64), mixed(64)
    uniform = np.random.default_rng(1).random(64)
    given = inputs(rows, uniform)
    found = Sampler(64, VOCABULARY, DEVICE).sample(logits, given, True)
    expected = sample(logits, uniform, rows)
    ids, counts, mask = (column.cpu().numpy() for column in found.supports)
    assert np.flatnonzero(counts >= 0).tolist() == expected.truncated.tolist()
    for row, kept in zip(expected.truncated, expected.supports, strict=True):
        differing = set(kept.tolist()) ^ set(expand_support(ids[row], int(counts[row]), mask[row]).tolist())
        if differing:
            assert differing <= at_the_top_p_cut(logits[row], rows.rows(np.array([row])))
    tokens, logprobs = found.tokens.cpu().numpy(), found.logprobs.cpu().numpy()
    steps = probabilities(logits, rows).cumsum(-1)
    for row in np.flatnonzero(tokens != expected.tokens):
        first, last = sorted((int(tokens[row]), int(expected.tokens[row])))
        assert abs(steps[row, first].item() - uniform[row]) < ROUNDING
        assert abs(steps[row, last - 1].item() - uniform[row]) < ROUNDING
    same = tokens == expected.tokens
    assert same.mean() > 0.9
    np.testing.assert_allclose(logprobs[same], expected.logprobs[same], atol=1e-5)
    assert torch.equal(given.last_token, found.tokens)


def at_the_top_p_cut(logits: torch.Tensor, row: Parameters) -> set[int]:
    """Tokens that rounding alone puts inside or outside."""
    values = (logits.float() / torch.tensor(row.temperature[0], dtype=torch.float32, device=DEVICE)).double()
    order = values.argsort(descending=True, stable=True)[: int(row.top_k[0]) or None]
    probability = torch.softmax(values[order], 0)
    before = probability.cumsum(0) - probability
    return set(order[(before - float(row.top_p[0])).abs() < ROUNDING].tolist())


@pytest.mark.parametrize("row", KINDS.values(), ids=KINDS)
def test_sampled_frequencies_match_the_exact_distribution(row):
    logits, rows = logits_bv(1, seed=2), parameters(row)
    temperature, *cuts = columns(rows)
    bounds = thresholds(logits, temperature, *cuts)
    stats = block_stats(logits, temperature, *bounds)
    many = (column.expand(DRAWS, *column.shape[1:]).contiguous() for column in (temperature, *bounds, *stats))
    uniform = torch.from_numpy(np.random.default_rng(3).random(DRAWS)).to(DEVICE)
    slots = torch.full((DRAWS,), -1, dtype=torch.int32, device=DEVICE)
    tokens, _ = pick(logits.expand(DRAWS, -1), *many, uniform, slots, slots)
    expected = DRAWS * probabilities(logits, rows)[0].cpu().numpy()
    observed = np.bincount(tokens.cpu().numpy(), minlength=VOCABULARY)
    assert observed[expected == 0].sum() == 0
    common = expected >= 10
    pooled = np.array([expected[~common].sum()])
    wanted = np.concatenate([expected[common], pooled[pooled > 0]])
    drawn = np.concatenate([observed[common], [observed[~common].sum()]])[: len(wanted)]
    freedom = len(wanted) - 1
    # Four standard deviations of the chi-square distribution above its mean.
    assert ((drawn - wanted) ** 2 / wanted).sum() <= freedom + 4 * math.sqrt(2 * freedom)


def test_a_row_alone_equals_itself_in_a_batch_bit_for_bit():
    logits, rows = logits_bv(9), mixed(9)
    uniform = np.linspace(0.05, 0.95, 9)
    sampler = Sampler(9, VOCABULARY, DEVICE)
    together = sampler.sample(logits, inputs(rows, uniform), True)
    tokens, logprobs = together.tokens.clone(), together.logprobs.clone()
    for row in range(9):
        one = np.array([row])
        alone = sampler.sample(logits[row : row + 1], inputs(rows.rows(one), uniform[one]), True)
        assert alone.tokens[0] == tokens[row]
        assert alone.logprobs[0] == logprobs[row]


def test_log_probs_are_the_same_bits_from_every_dtype_stride_and_alignment_with_a_bound_or_masked_to_it():
    logits, rows = logits_bv(64, seed=4), mixed(64)
    temperature, *cuts = columns(rows)
    bound, tie_last = bounds = thresholds(logits, temperature, *cuts)
    uniform = torch.from_numpy(np.random.default_rng(5).random(64)).to(DEVICE)
    slots = torch.full((64,), -1, dtype=torch.int32, device=DEVICE)
    stats = block_stats(logits, temperature, *bounds)
    tokens, logprobs = pick(logits, temperature, *bounds, *stats, uniform, slots, slots)
    values = logits.float() / torch.where(temperature == 0, 1, temperature)[:, None]
    ties = (values == bound[:, None]) & (torch.arange(VOCABULARY, device=DEVICE) <= tie_last[:, None])
    masked = logits.masked_fill(~((values > bound[:, None]) | ties), -math.inf)
    wide = torch.zeros(64, VOCABULARY + 13, dtype=torch.bfloat16, device=DEVICE)
    shifted = wide[:, 3 : 3 + VOCABULARY].copy_(masked)
    none = torch.full_like(bound, -math.inf), torch.full_like(tie_last, -1)
    for same, limits in ((logits, bounds), (logits.float(), bounds), (masked, none), (shifted, none)):
        stats = block_stats(same, temperature, *limits)
        assert torch.equal(score(same, temperature, *limits, *stats, tokens), logprobs)


@pytest.mark.parametrize("truncating", [False, True])
def test_a_captured_sampler_follows_its_inputs(truncating):
    rows = mixed(16) if truncating else parameters(*[(1.0, 0, 1.0, 0.0)] * 16)
    logits = logits_bv(16, seed=6)
    given = inputs(rows, np.random.default_rng(7).random(16))
    sampler = Sampler(16, VOCABULARY, DEVICE)
    sampler.sample(logits, given, truncating)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.sample(logits, given, truncating)
    logits.copy_(logits_bv(16, seed=8))
    given.uniform.copy_(torch.from_numpy(np.random.default_rng(9).random(16)))
    graph.replay()
    tokens, logprobs = captured.tokens.clone(), captured.logprobs.clone()
    assert torch.equal(given.last_token, tokens)
    eager = Sampler(16, VOCABULARY, DEVICE).sample(logits, given, truncating)
    assert torch.equal(tokens, eager.tokens)
    assert torch.equal(logprobs, eager.logprobs)
