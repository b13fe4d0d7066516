from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from headrace.engine.native.sampling import Parameters, Sampled, keep, sample
from headrace.kernels.logits import (
    Sampler,
    SamplerInputs,
    SamplerOutputs,
    block_stats,
    expand_support,
    pick,
    score,
    support_ids,
    thresholds,
)

# NumPy's own, from the interpreter, where a row is broken on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 100
BLOCK = 64
# Of the cumulative sums, between the reference's order of adding and the kernels'.
ROUNDING = 1e-6


def parameters(*rows: tuple[float, int, float, float]) -> Parameters:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Parameters(np.array(temperature, float), np.array(top_k), np.array(top_p, float), np.array(min_p, float))


def columns(rows: Parameters) -> tuple[torch.Tensor, ...]:
    kinds = (np.float32, np.int32, np.float32, np.float32)
    return tuple(torch.from_numpy(c.astype(kind)).to(DEVICE) for c, kind in zip(rows, kinds, strict=True))


def run(logits: torch.Tensor, uniform: np.ndarray, rows: Parameters, truncating=True, capacity=VOCABULARY):
    count = len(logits)
    slots = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    inputs = SamplerInputs(*columns(rows), torch.from_numpy(uniform).to(DEVICE), slots, slots.clone())
    return Sampler(count, logits.shape[1], DEVICE, capacity, BLOCK).sample(logits.to(DEVICE), inputs, truncating)


def support(found: SamplerOutputs, row: int) -> list[int]:
    ids, counts, mask = (column.cpu().numpy() for column in found.supports)
    return expand_support(ids[row], int(counts[row]), mask[row]).tolist()


def scaled(logits: torch.Tensor, rows: Parameters) -> torch.Tensor:
    divisor = torch.from_numpy(np.where(rows.temperature == 0, 1, rows.temperature).astype(np.float32))
    return logits.float() / divisor[:, None]


def normals(count: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))


class Case(NamedTuple):
    logits: torch.Tensor
    rows: Parameters
    uniform: np.ndarray
    found: SamplerOutputs
    expected: Sampled


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def case(request) -> Case:
    """Every combination of parameters, half of them for each dtype, on logits of several kinds."""
    combined = [*itertools.product([0.7, 1.0], [0, 1, 5, 40, 1000], [1.0, 0.9, 0.4], [0.0, 0.05, 0.6])]
    rows = parameters(*combined, (0, 0, 1, 0), (0, 5, 0.5, 0.5)).rows(
        np.arange(0 if request.param == torch.float32 else 1, 92, 2)
    )
    logits = normals(len(rows.top_k))
    logits[0::3] = (logits[0::3] * 2).round() / 2  # many exact ties
    logits[1::3][torch.rand(logits[1::3].shape, generator=torch.Generator().manual_seed(1)) < 0.4] = -math.inf
    logits = logits.to(request.param)
    uniform = np.random.default_rng(2).random(len(logits))
    return Case(logits, rows, uniform, run(logits, uniform, rows), sample(logits, uniform, rows))


def test_supports_equal_the_reference_for_every_combination_of_parameters(case):
    counts = case.found.supports.counts.cpu().numpy()
    assert np.flatnonzero(counts >= 0).tolist() == case.expected.truncated.tolist()
    assert (counts[~case.rows.truncates] == -1).all()
    for row, ids in zip(case.expected.truncated, case.expected.supports, strict=True):
        differing = set(ids.tolist()) ^ set(support(case.found, row))
        if differing:
            assert differing <= at_the_top_p_cut(case, row)


def at_the_top_p_cut(case: Case, row: int) -> set[int]:
    """Tokens that rounding alone puts inside or outside."""
    values = scaled(case.logits, case.rows)[row].double()
    order = values.argsort(descending=True, stable=True)
    most = case.rows.top_k[row] or VOCABULARY
    probability = torch.softmax(values[order[:most]], 0)
    before = probability.cumsum(0) - probability
    return set(order[:most][(before - case.rows.top_p[row]).abs() < ROUNDING].tolist())


def test_tokens_equal_the_reference_at_the_same_uniform(case):
    values = scaled(case.logits, case.rows)
    kept = keep(values, case.rows)
    for row, (token, expected) in enumerate(zip(case.found.tokens.tolist(), case.expected.tokens, strict=True)):
        if token != expected:
            steps = torch.softmax(values[row].double().masked_fill(~kept[row], -math.inf), 0).cumsum(0)
            first, last = sorted((token, int(expected)))
            assert abs(steps[first] - case.uniform[row]) < ROUNDING
            assert abs(steps[last - 1] - case.uniform[row]) < ROUNDING


def test_log_probs_equal_the_reference(case):
    same = case.found.tokens.cpu().numpy() == case.expected.tokens
    assert same.mean() > 0.9
    np.testing.assert_allclose(case.found.logprobs.cpu().numpy()[same], case.expected.logprobs[same], atol=1e-5)
    greedy = case.rows.temperature == 0
    assert (case.found.logprobs.cpu().numpy()[greedy] == 0).all()


DISTRIBUTIONS = {
    "temperature": (1.5, 0, 1.0, 0.0),
    "top_k": (1.0, 7, 1.0, 0.0),
    "top_p": (1.0, 0, 0.8, 0.0),
    "min_p": (1.0, 0, 1.0, 0.05),
    "all": (1.3, 30, 0.9, 0.02),
}


@pytest.mark.parametrize("row", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_evenly_spaced_uniforms_draw_every_token_as_often_as_its_probability_says(row):
    count = 120 if DEVICE == "cpu" else 20_000
    logits = normals(1, seed=3)
    rows = parameters(row)
    temperature, *cuts = columns(rows)
    uniform = torch.from_numpy((np.arange(count) + 0.37) / count).to(DEVICE)
    bounds = thresholds(logits.to(DEVICE), temperature, *cuts, block=BLOCK)
    stats = block_stats(logits.to(DEVICE), temperature, *bounds, block=BLOCK)
    many = (column.expand(count, *column.shape[1:]).contiguous() for column in (temperature, *bounds, *stats))
    slots = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    tokens, _ = pick(logits.to(DEVICE).expand(count, -1), *many, uniform, slots, slots, block=BLOCK)
    values = scaled(logits, rows)
    probability = torch.softmax(values.double().masked_fill(~keep(values, rows), -math.inf), -1)[0].numpy()
    observed = np.bincount(tokens.cpu().numpy(), minlength=VOCABULARY)
    assert observed[probability == 0].sum() == 0
    # A stretch of the CDF as long as n spacings holds n points, rounded down or up.
    assert (np.abs(observed - count * probability) < 1 + count * ROUNDING).all()


def test_score_gives_the_bits_of_pick_and_minus_infinity_outside_the_support():
    rows = parameters((1.0, 0, 1.0, 0.0), (0.7, 12, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.0, 0, 1.0, 0.0))
    logits = normals(4, seed=4).to(DEVICE)
    temperature, *cuts = columns(rows)
    known = logits, temperature, *thresholds(logits, temperature, *cuts, block=BLOCK)
    stats = block_stats(*known, block=BLOCK)
    uniform = torch.tensor([0.1, 0.5, 0.9, 0.3], dtype=torch.float64, device=DEVICE)
    slots = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    tokens, logprobs = pick(*known, *stats, uniform, slots, slots, block=BLOCK)
    assert torch.equal(score(*known, *stats, tokens), logprobs)
    assert score(*known, *stats, logits.argmin(-1)).tolist()[1:] == [-math.inf] * 3


def test_logits_masked_to_their_support_without_a_bound_have_the_same_log_probs_bit_for_bit():
    rows = parameters((1.0, 9, 1.0, 0.0), (0.7, 0, 0.9, 0.0), (1.3, 0, 1.0, 0.1), (0.0, 0, 1.0, 0.0))
    logits = normals(4, seed=5)
    found = run(logits, np.array([0.2, 0.4, 0.6, 0.8]), rows)
    masked = torch.full_like(logits, -math.inf)
    for row in range(4):
        masked[row, support(found, row)] = logits[row, support(found, row)]
    bare = (
        masked.to(DEVICE),
        columns(rows)[0],
        torch.full((4,), -math.inf, device=DEVICE),
        torch.full((4,), -1, dtype=torch.int32, device=DEVICE),
    )
    assert torch.equal(score(*bare, *block_stats(*bare, block=BLOCK), found.tokens), found.logprobs)


def test_a_row_alone_equals_itself_in_a_batch_and_in_a_wider_buffer_bit_for_bit():
    rows = parameters((1.0, 0, 1.0, 0.0), (0.7, 12, 0.9, 0.0), (1.0, 0, 0.8, 0.01))
    wide = normals(3, seed=6).repeat(1, 2).to(DEVICE)
    logits, uniform = wide[:, :VOCABULARY], np.array([0.2, 0.5, 0.7])
    together = run(logits, uniform, rows)
    for row in range(3):
        alone = run(logits[row : row + 1].contiguous(), uniform[row : row + 1], rows.rows(np.array([row])))
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]
        if row:
            assert support(alone, 0) == support(together, row)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_broken_logits_give_a_nan_log_prob_in_their_row_alone_however_it_truncates(bad):
    rows = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.5)]
    logits = normals(2 * len(rows), seed=7)
    logits[1::2, 70] = bad
    found = run(logits, np.full(len(logits), 0.5), parameters(*(row for row in rows for _ in range(2))))
    assert torch.isnan(found.logprobs).tolist() == [False, True] * len(rows)
    assert ((found.tokens >= 0) & (found.tokens < VOCABULARY)).all()


def test_a_row_of_minus_infinity_has_no_support_and_a_nan_log_prob():
    found = run(
        torch.full((2, VOCABULARY), -math.inf), np.array([0.5, 0.5]), parameters((1, 3, 1, 0), (1, 0, 1, 0))
    )
    assert torch.isnan(found.logprobs).all()
    assert found.supports.counts.tolist() == [0, -1]


def test_equal_logits_are_kept_from_the_lowest_id_across_blocks():
    rows = parameters(
        (1.0, 71, 1.0, 0.0), (1.0, 0, 0.75, 0.0), (1.0, 80, 0.5, 0.0), (0.0, 0, 1.0, 0.0), (1, 1000, 1, 0)
    )
    found = run(torch.full((5, VOCABULARY), 2.5), np.full(5, 0.999999), rows)
    assert [support(found, row) for row in range(5)] == [list(range(n)) for n in (71, 75, 40, 1, 100)]
    assert found.tokens.tolist() == [70, 74, 39, 0, 99]


def test_the_order_is_exact_over_all_magnitudes_and_both_zeros_are_equal():
    logits = torch.tensor([[1e38, -1e38, 1e-40, -1e-40, 0.0, -0.0, 5.0, 5.0, -math.inf, -2e38]])
    order = [0, 6, 7, 2, 4, 5, 3, 1, 9]
    ks = [2, 3, 4, 5, 6, 7, 8]
    found = run(logits.expand(len(ks), -1), np.full(len(ks), 0.5), parameters(*((1.0, k, 1.0, 0.0) for k in ks)))
    assert [support(found, row) for row in range(len(ks))] == [sorted(order[:k]) for k in ks]


def test_neighbouring_floats_are_told_apart():
    logits = 1 + torch.arange(10.0)[None] * 2.0**-23
    found = run(logits.expand(4, -1), np.full(4, 0.5), parameters(*((1.0, k, 1.0, 0.0) for k in (2, 3, 4, 9))))
    assert [support(found, row) for row in range(4)] == [list(range(10 - k, 10)) for k in (2, 3, 4, 9)]


def test_the_bound_of_top_k_is_the_correctly_rounded_quotient_of_the_kth_logit():
    logits, rows = normals(6, seed=11), parameters(*((t, 9, 1.0, 0.0) for t in (0.3, 0.6, 0.7, 0.9, 1.1, 1.7)))
    bound, _ = thresholds(logits.to(DEVICE), *columns(rows), block=BLOCK)
    assert torch.equal(bound.cpu(), scaled(logits, rows).sort(descending=True).values[:, 8])


def test_min_p_keeps_every_token_exactly_at_its_floor_whatever_top_k_left_of_the_ties_below():
    floor = float(np.log(np.float64(0.5)))
    found = run(
        torch.tensor([[0, floor, floor, floor, -2, -2, -2]]), np.array([0.5]), parameters((1.0, 5, 1.0, 0.5))
    )
    assert support(found, 0) == [0, 1, 2, 3]


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token_that_can_be_drawn():
    logits = torch.full((2, VOCABULARY), -1000.0)  # of probability zero, though in the support
    logits[:, [5, 50, 90]] = torch.tensor([0.0, 1.0, 2.0])
    found = run(logits, np.array([0.0, 1 - 2.0**-53]), parameters(*[(1.0, 0, 1.0, 0.0)] * 2))
    assert found.tokens.tolist() == [5, 90]


def test_a_support_over_capacity_is_counted_in_full_and_read_from_the_mask():
    logits = normals(3, seed=8)
    rows = parameters((1.0, 75, 1.0, 0.0), (1.0, 20, 1.0, 0.0), (1.0, 0, 1.0, 0.0))
    found = run(logits, np.full(3, 0.5), rows, capacity=20)
    expected = [np.flatnonzero(kept).tolist() for kept in keep(logits, rows).numpy()]
    assert found.supports.counts.tolist() == [75, 20, -1]
    assert found.supports.ids[0].tolist() == expected[0][:20]
    assert [support(found, row) for row in range(2)] == expected[:2]


def test_support_ids_writes_nothing_for_a_row_that_does_not_truncate():
    logits = normals(1, seed=9).to(DEVICE)
    temperature, *cuts = columns(parameters((1.0, 0, 1.0, 0.0)))
    bounds = thresholds(logits, temperature, *cuts, block=BLOCK)
    assert [column.tolist() for column in bounds] == [[-math.inf], [-1]]
    out = [torch.full(shape, 77, dtype=torch.int32, device=DEVICE) for shape in ((1, 3), (1,), (1, 4))]
    ids, counts, mask = support_ids(logits, temperature, *bounds, 3, block=BLOCK, out=tuple(out))
    assert (ids.tolist(), counts.tolist(), mask.tolist()) == ([[77] * 3], [-1], [[77] * 4])


def test_rows_that_do_not_truncate_are_the_same_bits_when_no_kernel_looks_for_bounds():
    logits, uniform = normals(3, seed=10), np.array([0.1, 0.4, 0.8])
    rows = parameters(*[(t, 0, 1.0, 0.0) for t in (1.0, 0.5, 2.0)])
    quick, slow = run(logits, uniform, rows, truncating=False), run(logits, uniform, rows)
    assert quick.supports is None
    assert torch.equal(quick.tokens, slow.tokens)
    assert torch.equal(quick.logprobs, slow.logprobs)


def test_the_token_goes_to_the_last_token_of_its_slot_and_nowhere_without_one():
    logits = torch.zeros(3, 8)
    logits[[0, 1, 2], [4, 2, 6]] = 50.0
    last_token = torch.full((5,), 99, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    uniform = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    inputs = SamplerInputs(*columns(parameters(*[(1.0, 0, 1.0, 0.0)] * 3)), uniform, slots, last_token)
    Sampler(4, 8, DEVICE, block=BLOCK).sample(logits.to(DEVICE), inputs, False)
    assert last_token.tolist() == [6, 99, 99, 4, 99]


def test_a_support_is_expanded_from_the_list_or_over_capacity_from_the_mask():
    mask = np.array([0b1001, -(2**31)], np.int32)
    assert expand_support(np.array([7, 9, 0, 0], np.int32), 2, mask).tolist() == [7, 9]
    assert expand_support(np.array([0, 3], np.int32), 3, mask).tolist() == [0, 3, 63]
    assert expand_support(np.array([0, 3], np.int32), 3, mask).dtype == np.int32
