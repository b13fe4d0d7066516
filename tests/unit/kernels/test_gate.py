from __future__ import annotations

import pytest
import torch

from headrace.kernels.gate import gated_silu
from headrace.models.ops import ReferenceOps

reference = ReferenceOps()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where it should round to bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_within_one_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but where an exponential's last place falls on the other side of a rounding."""
    assert found.dtype == expected.dtype
    step = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=max(2 * step, 1e-5))
    if expected.dtype != torch.float32:
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (2, 3, 1000), (4, 2500)])
def test_the_product_is_the_reference_s(shape, dtype):
    gate, up = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    assert_within_one_rounding(gated_silu(gate, up), reference.gated_silu(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_may_be_columns_of_one_product(dtype):
    both = draw(6, 2 * 1040, dtype=dtype)
    gate, up = both.split(1040, -1)
    found = gated_silu(gate, up)
    assert found.is_contiguous()
    assert_within_one_rounding(found, reference.gated_silu(gate, up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_neither_overflow_nor_vanish():
    gate = torch.tensor([[-1e4, -80.0, 0.0, 80.0, 1e4]], device=DEVICE)
    found = gated_silu(gate, torch.full_like(gate, 2.0))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0, 160.0, 2e4]], device=DEVICE))


def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit():
    gate, up = draw(17, 96, dtype=torch.float16), draw(17, 96, dtype=torch.float16, seed=1)
    assert torch.equal(gated_silu(gate[9:10], up[9:10])[0], gated_silu(gate, up)[9])
