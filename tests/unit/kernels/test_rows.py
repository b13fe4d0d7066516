from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.rows import occurrences, sum_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def summed(values: torch.Tensor, rows: np.ndarray, count: int) -> torch.Tensor:
    out = torch.full((count, *values.shape[1:]), float("nan"), dtype=values.dtype, device=DEVICE)
    sum_rows(values, *(torch.from_numpy(one).to(DEVICE) for one in occurrences(rows)), out)
    return out


@pytest.mark.parametrize("shape", [(1,), (2, 40), (3, 700)], ids=str)
def test_rows_are_summed_where_they_came_from(shape):
    dice = np.random.default_rng(0)
    rows = dice.integers(0, 9, 50)
    values = torch.from_numpy(dice.normal(size=(50, *shape))).float().to(DEVICE)
    expected = torch.zeros(12, *shape, device=DEVICE).index_add_(0, torch.from_numpy(rows).to(DEVICE), values)
    torch.testing.assert_close(summed(values, rows, 12), expected, rtol=1e-5, atol=1e-5)


def test_sums_are_of_float32_in_the_order_of_the_places():
    # One after the other in bfloat16, whose neighbours are 2 apart there, both ones would be lost.
    values = torch.tensor([256.0, 5.0, 1.0, 1.0], dtype=torch.bfloat16, device=DEVICE).view(4, 1, 1)
    assert summed(values, np.array([0, 2, 0, 0]), 3).flatten().tolist() == [258.0, 0.0, 5.0]
    starts, places = occurrences(np.array([1, 0, 1, 3]))
    assert starts.tolist() == [0, 1, 3, 3, 4]
    assert places.tolist() == [1, 0, 2, 3]


def test_nothing_is_the_sum_of_nothing():
    nothing = torch.empty(0, 3, device=DEVICE)
    assert summed(nothing, np.empty(0, np.int64), 2).tolist() == [[0.0] * 3] * 2
