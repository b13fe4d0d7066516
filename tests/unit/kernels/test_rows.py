from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels.rows import occurrences, sum_rows, take_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (2, 40), (3, 700)]


def drawn(rows: int, heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, rows, heads, dim, generator=dice).to(DEVICE)
    return first, second


def where(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    starts, places = (torch.from_numpy(one).to(DEVICE) for one in occurrences(rows))
    return starts, places


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_taken_with_each_head_repeated(shape, repeats):
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 9, 50)).to(DEVICE)
    given = drawn(9, *shape)
    for found, one in zip(take_rows(given, rows, repeats), given, strict=True):
        assert torch.equal(found, one[rows].repeat_interleave(repeats, 1))
    for found, one in zip(take_rows(given, None, repeats), given, strict=True):
        assert torch.equal(found, one.repeat_interleave(repeats, 1))


def test_rows_are_taken_from_columns_of_a_wider_matrix():
    both = drawn(6, 1, 48)[0]
    wide = both.view(6, 48)
    given = wide[:, :16].unflatten(1, (2, 8)), wide[:, 16:32].unflatten(1, (2, 8))
    rows = torch.tensor([5, 0, 5], device=DEVICE)
    for repeats in (1, 2):
        for found, one in zip(take_rows(given, rows, repeats), given, strict=True):
            assert torch.equal(found, one[rows].repeat_interleave(repeats, 1))


def test_a_single_head_lies_together_whatever_its_stride():
    first, second = (x.as_strided((4, 1, 8), (8, 999, 1)) for x in drawn(4, 1, 8))
    for found, one in zip(take_rows((first, second), None, 2), (first, second), strict=True):
        assert torch.equal(found, one.repeat_interleave(2, 1))


def test_heads_that_do_not_lie_together_are_refused():
    apart = drawn(3, 2, 8)[0].transpose(0, 1)
    with pytest.raises(AssertionError, match="lie together"):
        take_rows((apart, apart), None)
    with pytest.raises(AssertionError):
        sum_rows((apart, apart), None, 2)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_summed_where_they_came_from(shape, repeats):
    rows = np.random.default_rng(0).integers(0, 9, 50)
    heads, dim = shape
    values = drawn(50, heads * repeats, dim)
    for found, one in zip(sum_rows(values, where(rows), 12, repeats), values, strict=True):
        of_heads = one.view(50, heads, repeats, dim).sum(2)
        expected = torch.zeros(12, *shape, device=DEVICE).index_add_(0, torch.from_numpy(rows).to(DEVICE), of_heads)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for found, one in zip(sum_rows(values, None, 50, repeats), values, strict=True):
        torch.testing.assert_close(found, one.view(50, heads, repeats, dim).sum(2), rtol=1e-5, atol=1e-5)


def test_sums_are_of_float32_in_the_order_of_the_places():
    # One after the other in bfloat16, whose neighbours are 2 apart there, both ones would be lost.
    values = torch.tensor([256.0, 5.0, 1.0, 1.0], dtype=torch.bfloat16, device=DEVICE).view(4, 1, 1)
    for found in sum_rows((values, values), where(np.array([0, 2, 0, 0])), 3):
        assert found.flatten().tolist() == [258.0, 0.0, 5.0]
    starts, places = occurrences(np.array([1, 0, 1, 3]))
    assert starts.tolist() == [0, 1, 3, 3, 4]
    assert places.tolist() == [1, 0, 2, 3]


def test_nothing_is_the_sum_of_nothing():
    nothing = torch.empty(0, 1, 3, device=DEVICE)
    for found in sum_rows((nothing, nothing), where(np.empty(0, np.int64)), 2):
        assert found.tolist() == [[[0.0] * 3]] * 2
    for found in take_rows((nothing, nothing), None):
        assert found.shape == (0, 1, 3)
