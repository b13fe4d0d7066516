from __future__ import annotations

import pytest
import torch

from headrace.kernels.matmul import Tile, linear, tile
from interpreted import product_apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Some fit for descriptors in half precision, some only for pointers.
SHAPES = [(1, 1, 1), (3, 40, 24), (65, 33, 17), (70, 96, 136), (130, 70, 64), (5, 7, 300), (64, 128, 8)]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding from the float64 result, but for a float32 sum's own error."""
    assert found.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=max(step, 1e-5), atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_the_product_is_that_of_float64_rounded(rows, columns, depth, biased, dtype):
    x, weight = draw(rows, depth, dtype=dtype), draw(columns, depth, dtype=dtype, seed=1)
    bias = draw(columns, dtype=dtype, seed=2) if biased else None
    exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert_rounded(linear(x, weight, bias), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 45])
def test_rows_may_lie_apart(width, dtype):
    x, weight = draw(9, 2 * width, dtype=dtype), draw(20, 3 * width, dtype=dtype, seed=1)
    x, weight = x[:, width:], weight[::2, :width]
    assert_rounded(linear(x, weight), x.double() @ weight.double().T, dtype)
    turned = draw(width, 9, dtype=dtype).T
    assert_rounded(linear(turned, weight), turned.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [64, 77])
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(depth, dtype, same_bits):
    x, weight = draw(64, depth, dtype=dtype), draw(50, depth, dtype=dtype, seed=1)
    together, apart = linear(x, weight), product_apart(x, weight)
    for row in (0, 7, 63):
        same_bits(linear(x[row : row + 1], weight)[0], together[row], apart[row])
    same_bits(linear(x.flip(0), weight).flip(0), together, apart)


def test_a_projection_alone_equals_its_columns_of_a_joint_product_bit_for_bit(same_bits):
    x, weight = draw(5, 64, dtype=torch.float16), draw(96, 64, dtype=torch.float16, seed=1)
    apart = torch.cat([linear(x, part) for part in weight.split([32, 16, 48])], 1)
    same_bits(apart, linear(x, weight), product_apart(x, weight))


def test_no_rows_are_no_rows():
    assert linear(draw(0, 8, dtype=torch.float16), draw(4, 8, dtype=torch.float16)).shape == (0, 4)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 6144, Tile(64, 32, 128, 4, 4)),
        (64, 24576, Tile(64, 128, 64, 4, 4)),
        (256, 4096, Tile(64, 64, 64, 4, 4)),
        (256, 24576, Tile(128, 64, 64, 4, 4)),
        (4096, 4096, Tile(128, 128, 64, 8, 3)),
    ],
)
def test_tiles_are_the_fastest_that_were_measured(rows, columns, expected):
    assert tile(rows, columns) == expected
