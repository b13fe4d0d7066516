from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels.quantize import FLOAT8, quantize_rows
from headrace.models import quantized as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [(1, 1), (3, 80), (70, 36), (5, 128), (2, 1536)]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values before their cast, which the interpreter does in its own way, scales)."""
    return quantize_rows(x, torch.full(x.shape, torch.nan, dtype=torch.float32, device=x.device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_scaled_and_cast_as_in_the_reference(size, dtype):
    x = draw(*size, dtype=dtype)
    values, scales = scaled(x)
    expected = reference.quantize_rows(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(values.to(FLOAT8).view(torch.uint8), expected.values.view(torch.uint8))
    if DEVICE == "cuda":
        assert torch.equal(quantize_rows(x)[0].view(torch.uint8), expected.values.view(torch.uint8))


def test_new_values_are_float8():
    values, scales = quantize_rows(draw(3, 32))
    assert (values.dtype, values.shape) == (FLOAT8, (3, 32))
    assert (scales.dtype, scales.shape) == (torch.float32, (3, 1))


def test_they_are_written_where_they_belong_and_nowhere_else():
    block, kept = torch.full((6, 40), 7.0, device=DEVICE), torch.full((6, 1), 7.0, device=DEVICE)
    x = draw(3, 40)
    quantize_rows(x, block[2:5], kept[2:5])
    values, scales = scaled(x)
    assert torch.equal(block[2:5], values)
    assert torch.equal(kept[2:5], scales)
    assert (block[[0, 1, 5]] == 7).all()
    assert (kept[[0, 1, 5]] == 7).all()


def test_rows_may_lie_apart_in_a_wider_tensor():
    wide = draw(5, 96)
    for found, expected in zip(scaled(wide[:, 32:64]), scaled(wide[:, 32:64].contiguous()), strict=True):
        assert torch.equal(found, expected)


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_numbers():
    x = torch.zeros(2, 8, device=DEVICE)
    x[1, 3] = 1e-37
    values, scales = scaled(x)
    assert values[0].tolist() == [0.0] * 8
    assert values.isfinite().all()
    assert (scales > 0).all()


def test_what_is_not_a_number_stays_visible():
    x = draw(2, 8)
    x[0, 1], x[1, 2] = float("nan"), float("inf")
    assert scaled(x)[0].isnan().any(1).tolist() == [True, True]


@pytest.mark.parametrize("width", [64, 1536])
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(width):
    x = draw(33, width)
    values, scales = scaled(x)
    for row in (0, 7, 32):
        alone = scaled(x[row : row + 1])
        assert torch.equal(alone[0][0], values[row])
        assert torch.equal(alone[1][0], scales[row])


def test_columns_that_lie_apart_and_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="rows must be contiguous"):
        quantize_rows(draw(8, 4).T)
    with pytest.raises(ValueError, match="values of shape"):
        quantize_rows(draw(4, 8), torch.empty(4, 9, device=DEVICE))


def test_the_constants_are_the_reference_s():
    from headrace.kernels import quantize as kernel

    assert (kernel.FLOAT8, kernel.LARGEST, kernel.LEAST) == (reference.FLOAT8, reference.LARGEST, reference.LEAST)


def test_no_rows_are_no_rows():
    values, scales = quantize_rows(draw(0, 64))
    assert (values.shape, scales.shape) == ((0, 64), (0, 1))
