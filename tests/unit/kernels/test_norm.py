from __future__ import annotations

import pytest
import torch

from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.models.ops import ReferenceOps

reference = ReferenceOps()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
EPS = 1e-6


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_within_one_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but where a float32 sum in another order falls on the other side of a rounding."""
    assert found.dtype == expected.dtype
    step = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, atol=0, rtol=2 * step if step > 1e-5 else 1e-5)
    if expected.dtype != torch.float32:
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "width"), [((1,), 1), ((3,), 80), ((2, 5), 128), ((70,), 36), ((2,), 1536)])
def test_the_norm_is_the_reference_s(shape, width, dtype):
    x, weight = draw(*shape, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    assert_within_one_rounding(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (9, 80), (2, 1536)])
def test_the_norm_of_a_sum_rounds_the_sum_first(rows, width, dtype):
    x, residual = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype, seed=2)
    weight = draw(width, dtype=dtype, seed=1)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_within_one_rounding(normed, reference.rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "rows", "width"), [(2, 9, 80), (4, 3, 1536)])
def test_parts_are_summed_and_rounded_before_the_residual_is_added(parts, rows, width, dtype):
    x = draw(parts, rows, width, dtype=torch.float32)
    residual, weight = draw(rows, width, dtype=dtype, seed=2), draw(width, dtype=dtype, seed=1)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    whole = x[0].clone()
    for part in x[1:]:
        whole += part
    assert torch.equal(total, whole.to(dtype) + residual)
    assert_within_one_rounding(normed, reference.rms_norm(total, weight, EPS))


def test_inputs_are_unchanged():
    x, residual, weight = (draw(3, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    before = [x.clone(), residual.clone(), weight[0].clone()]
    add_rms_norm(x, residual, weight[0], EPS)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, residual, weight[0]), strict=True))


@pytest.mark.parametrize("width", [48, 1040])
def test_rows_may_lie_apart_in_wider_tensors(width):
    wide, other = draw(5, 3 * width, dtype=torch.float32), draw(5, 2 * width, dtype=torch.float32, seed=3)
    weight = draw(width, dtype=torch.float32, seed=1)
    x, residual = wide[:, width : 2 * width], other[:, :width]
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_within_one_rounding(normed, reference.rms_norm(x + residual, weight, EPS))
    heads = wide.view(5, 3, width)[:, 1:]  # no single stride leads from row to row
    assert_within_one_rounding(rms_norm(heads, weight, EPS), reference.rms_norm(heads, weight, EPS))


def test_a_column_of_a_transposed_tensor_is_no_trap():
    x, weight = draw(24, 6, dtype=torch.float32).T, draw(24, dtype=torch.float32, seed=1)
    assert_within_one_rounding(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1536])
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(width, dtype):
    x, weight = draw(33, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    together = rms_norm(x, weight, EPS)
    for row in (0, 7, 32):
        assert torch.equal(rms_norm(x[row : row + 1], weight, EPS)[0], together[row])


def test_no_rows_are_no_rows():
    x, weight = draw(0, 64, dtype=torch.float32), draw(64, dtype=torch.float32)
    normed, total = add_rms_norm(x, x, weight, EPS)
    assert normed.shape == total.shape == (0, 64)
