from __future__ import annotations

import math

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

from headrace.engine.native.sampling import keep
from headrace.kernels.logits import block_stats, pick, score
from headrace.kernels.truncation import thresholds

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
