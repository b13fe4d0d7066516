from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sampling_builders import (
    BLOCK,
    DEVICE,
    ROUNDING,
    VOCABULARY,
    columns,
    normals,
    parameters,
    run,
    scaled,
    support,
)

from headrace.engine.native.sampling import Parameters, Sampled, keep, sample
from headrace.kernels.sampler import Sampler, SamplerInputs, SamplerOutputs

# NumPy's own, from the interpreter, where a row is broken on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


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


def test_rows_that_do_not_truncate_are_the_same_bits_when_no_kernel_looks_for_bounds():
    logits, uniform = normals(3, seed=10), np.array([0.1, 0.4, 0.8])
    rows = parameters(*[(t, 0, 1.0, 0.0) for t in (1.0, 0.5, 2.0)])
    quick, slow = run(logits, uniform, rows, truncating=False), run(logits, uniform, rows)
    assert quick.supports is None
    assert torch.equal(quick.tokens, slow.tokens)
    assert torch.equal(quick.logprobs, slow.logprobs)


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


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token_that_can_be_drawn():
    logits = torch.full((2, VOCABULARY), -1000.0)  # of probability zero, though in the support
    logits[:, [5, 50, 90]] = torch.tensor([0.0, 1.0, 2.0])
    found = run(logits, np.array([0.0, 1 - 2.0**-53]), parameters(*[(1.0, 0, 1.0, 0.0)] * 2))
    assert found.tokens.tolist() == [5, 90]


def test_the_token_goes_to_the_last_token_of_its_slot_and_nowhere_without_one():
    logits = torch.zeros(3, 8)
    logits[[0, 1, 2], [4, 2, 6]] = 50.0
    last_token = torch.full((5,), 99, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    uniform = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    inputs = SamplerInputs(*columns(parameters(*[(1.0, 0, 1.0, 0.0)] * 3)), uniform, slots, last_token)
    Sampler(4, 8, DEVICE, block=BLOCK).sample(logits.to(DEVICE), inputs, False)
    assert last_token.tolist() == [6, 99, 99, 4, 99]
