from __future__ import annotations

import math

import numpy as np
import torch
from sampling_builders import BLOCK, DEVICE, VOCABULARY, columns, normals, parameters, run, scaled, support

from headrace.engine.native.sampling import keep
from headrace.kernels.truncation import expand_support, support_ids, thresholds


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


def test_a_support_is_expanded_from_the_list_or_over_capacity_from_the_mask():
    mask = np.array([0b1001, -(2**31)], np.int32)
    assert expand_support(np.array([7, 9, 0, 0], np.int32), 2, mask).tolist() == [7, 9]
    assert expand_support(np.array([0, 3], np.int32), 3, mask).tolist() == [0, 3, 63]
    assert expand_support(np.array([0, 3], np.int32), 3, mask).dtype == np.int32
