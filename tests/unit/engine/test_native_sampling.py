from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.engine.native.sampling import Parameters, sample, seed_word, uniforms

LOGITS = np.array([2.0, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0], np.float32)


def parameters(count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Parameters:
    return Parameters(
        np.full(count, temperature), np.full(count, top_k), np.full(count, top_p), np.full(count, min_p)
    )


def exact(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The definition, token by token, in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = ranked[: top_k or None]
    weights = {i: math.exp(scaled[i]) for i in kept}
    total, reached, shortest = sum(weights.values()), 0.0, []
    for i in kept:
        if reached >= top_p and shortest:
            break
        shortest.append(i)
        reached += weights[i] / total
    kept = shortest if top_p < 1 else kept
    kept = [i for i in kept if weights[i] >= min_p * weights[kept[0]]]
    out = np.zeros(len(scaled))
    for i in kept:
        out[i] = weights[i] / sum(weights[j] for j in kept)
    return out


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 2},
    {"top_k": 100},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.85, "min_p": 0.3},
    {"top_k": 4, "top_p": 0.75},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampled_frequencies_match_the_exact_distribution(case):
    count = 40_000
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    drawn = sample(torch.from_numpy(LOGITS).expand(count, -1), uniform, parameters(count, **case))
    expected = exact(LOGITS, **case)
    observed = np.bincount(drawn.tokens, minlength=len(LOGITS))
    assert observed[expected == 0].sum() == 0
    inside = expected > 0
    chi_square = ((observed[inside] - count * expected[inside]) ** 2 / (count * expected[inside])).sum()
    freedom = inside.sum() - 1
    # Four standard deviations of the chi-square distribution above its mean.
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9
    np.testing.assert_allclose(drawn.logprobs, np.log(expected[drawn.tokens]), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_support_is_exactly_what_could_be_sampled(case):
    drawn = sample(torch.from_numpy(LOGITS)[None], np.array([0.3]), parameters(1, **case))
    possible = np.flatnonzero(exact(LOGITS, **case)).tolist()
    if set(case) <= {"temperature"}:
        assert drawn.supports == []
        assert drawn.truncated.tolist() == []
    else:
        assert drawn.supports[0].tolist() == possible
        assert drawn.supports[0].dtype == np.int32


def test_random_logits_and_mixed_rows_agree_with_the_definition():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 50)).astype(np.float32) * 3
    rows = [
        {
            "temperature": float(rng.choice([0.6, 1.0, 1.4])),
            "top_k": int(rng.choice([0, 1, 7, 50])),
            "top_p": float(rng.choice([1.0, 0.9, 0.5])),
            "min_p": float(rng.choice([0.0, 0.02, 0.3])),
        }
        for _ in range(300)
    ]
    mixed = Parameters(*(np.array([row[name] for row in rows]) for name in Parameters._fields))
    drawn = sample(torch.from_numpy(logits), rng.random(300), mixed)
    supports = dict(zip(drawn.truncated.tolist(), drawn.supports, strict=True))
    for i, row in enumerate(rows):
        expected = exact(logits[i], **row)
        truncates = row["top_k"] > 0 or row["top_p"] < 1 or row["min_p"] > 0
        assert (i in supports) == truncates
        if truncates:
            assert supports[i].tolist() == np.flatnonzero(expected).tolist()
        assert abs(drawn.logprobs[i] - math.log(expected[drawn.tokens[i]])) < 1e-4


def test_greedy_takes_the_best_token_the_lowest_id_of_equals_with_log_prob_zero():
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [9.0, 1.0, 2.0, 3.0]])
    drawn = sample(logits, np.array([0.99, 0.99]), parameters(2, temperature=0.0))
    assert drawn.tokens.tolist() == [1, 0]
    assert drawn.logprobs.tolist() == [0.0, 0.0]
    assert [ids.tolist() for ids in drawn.supports] == [[1], [0]]


def test_a_token_with_logit_minus_infinity_is_neither_sampled_nor_in_a_support():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    drawn = sample(logits, np.array([0.999999]), parameters(1, top_k=3))
    assert drawn.supports[0].tolist() == [0, 2]


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform():
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]])).expand(5, -1)
    drawn = sample(logits, np.array([0.0, 0.19, 0.21, 0.51, 1 - 2**-53]), parameters(5))
    assert drawn.tokens.tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("case", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_broken_logits_show_as_a_nan_log_prob_in_their_row_alone(bad, case):
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, bad, 2.0]])
    drawn = sample(logits, np.array([0.5, 0.5]), parameters(2, **case))
    assert np.isnan(drawn.logprobs).tolist() == [False, True]


def test_uniforms_are_splitmix64_of_seed_and_index():
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, index in [(0, 0), (1, 0), (-5, 3), (2**70 + 9, 1000)]:
        expected = mix((mix(seed & mask) + (index + 1) * 0x9E3779B97F4A7C15) & mask) >> 11
        found = uniforms(np.array([seed_word(seed)]), np.array([index]))
        assert found[0] == expected * 2.0**-53


def test_uniforms_are_flat_over_seeds_and_over_indices():
    for drawn in (
        uniforms(np.arange(100_000, dtype=np.uint64), np.zeros(100_000, np.int64)),
        uniforms(np.full(100_000, 42, np.uint64), np.arange(100_000)),
    ):
        counts = np.histogram(drawn, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 4 * math.sqrt(198)
        assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.015
