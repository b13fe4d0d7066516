from __future__ import annotations

import pytest
import torch

from headrace.kernels.adapters import keep_own

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
SCALES = [0.0, 2.0, 4 / 3, 0.1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("projections", "rank"), [(1, 1), (3, 4), (2, 300)])
def test_a_token_keeps_its_own_columns_times_its_scale_and_zeros(projections, rank, dtype):
    adapters, numbers = len(SCALES) - 1, [0, 1, 2, 3, 3, 0, 1]
    dice = torch.Generator().manual_seed(0)
    columns = torch.randn(len(numbers), projections * adapters * rank, generator=dice).to(DEVICE, dtype)
    expected = torch.zeros_like(columns)
    for row, number in enumerate(numbers):
        for projection in range(projections if number else 0):
            first = (projection * adapters + number - 1) * rank
            own = slice(first, first + rank)
            # A number that a tensor is multiplied by is not rounded to its type first.
            expected[row, own] = columns[row, own] * SCALES[number]
    scales = torch.tensor(SCALES, device=DEVICE)
    found = keep_own(columns, torch.tensor(numbers, dtype=torch.int32, device=DEVICE), scales, rank)
    assert found is columns
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_what_is_no_number_in_anothers_columns_becomes_zero():
    columns = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [float("nan"), float("inf")]], device=DEVICE)
    numbers = torch.tensor([1, 2, 0], dtype=torch.int32, device=DEVICE)
    found = keep_own(columns, numbers, torch.tensor([0.0, 3.0, 5.0], device=DEVICE), 1)
    assert found.tolist() == [[3.0, 0.0], [0.0, 10.0], [0.0, 0.0]]


def test_no_tokens_are_nothing():
    nothing = torch.empty(0, 8, device=DEVICE)
    numbers = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert keep_own(nothing, numbers, torch.zeros(2, device=DEVICE), 8).shape == (0, 8)
