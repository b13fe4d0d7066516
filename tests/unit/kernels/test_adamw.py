from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernels import adamw
from headrace.kernels.adamw import AdamW, pieces

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [1, 7, 0, adamw.AT_ONCE - 1, adamw.AT_ONCE, adamw.AT_ONCE + 1, adamw.PIECE, 2 * adamw.PIECE + 13]
ROUNDING = torch.finfo(torch.float32).eps
HOW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def draw(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Pair:
    """The same parameters twice: updated by the kernel, and by torch one after another."""

    def __init__(self, sizes: list[int], *, shift: int = 0, decays: list[bool] | None = None, **how: Any):
        self.how = HOW | how
        # Four blocks, one for each kind; between tensors lie elements that are nobody's.
        block = [torch.full((sum(sizes) + 8 * len(sizes) + shift,), 0.5, device=DEVICE) for _ in range(4)]
        starts = [shift + sum(sizes[:i]) + 8 * i for i in range(len(sizes))]
        self.kinds = [
            [kind[start : start + size] for start, size in zip(starts, sizes, strict=True)] for kind in block
        ]
        self.between = torch.ones(len(block[0]), dtype=torch.bool, device=DEVICE)
        for start, size in zip(starts, sizes, strict=True):
            self.between[start : start + size] = False
        self.block = block
        for seed, tensors in enumerate(zip(*self.kinds, strict=True)):
            tensors[0].copy_(draw(len(tensors[0]), seed))
            for other in tensors[1:]:
                other.zero_()
        self.expected = [torch.nn.Parameter(tensor.clone()) for tensor in self.kinds[0]]
        groups = [
            {"params": [parameter], "weight_decay": self.how["weight_decay"] * flag}
            for parameter, flag in zip(self.expected, decays or [True] * len(sizes), strict=True)
        ]
        self.torch = torch.optim.AdamW(groups, foreach=False, fused=False, **self.how)
        self.kernel = AdamW(*self.kinds, decays)

    def step(self, number: int, rate: float, max_norm: float) -> None:
        for seed, (gradient, parameter) in enumerate(zip(self.kinds[1], self.expected, strict=True)):
            gradient.copy_(draw(len(gradient), 100 * number + seed))
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.get_total_norm(self.kinds[1])
        self.kernel.step(number, norm, rate=rate, max_norm=max_norm, **self.how)
        torch.nn.utils.clip_grad_norm_(self.expected, max_norm)
        for group in self.torch.param_groups:
            group["lr"] = rate
        self.torch.step()

    def check(self, moved: float) -> None:
        """Parameters within roundings of their own and of `moved`, how far steps took them; moments, of the sizes
        that they were added up from."""
        for value, first, second, parameter in zip(
            self.kinds[0], self.kinds[2], self.kinds[3], self.expected, strict=True
        ):
            state = self.torch.state[parameter]
            torch.testing.assert_close(value, parameter.detach(), rtol=4 * ROUNDING, atol=16 * ROUNDING * moved)
            size = float(state["exp_avg_sq"].max()) ** 0.5 if len(value) else 0.0
            torch.testing.assert_close(first, state["exp_avg"], rtol=4 * ROUNDING, atol=16 * ROUNDING * size)
            torch.testing.assert_close(second, state["exp_avg_sq"], rtol=16 * ROUNDING, atol=0)
        for kind in self.block:
            assert (kind[self.between] == 0.5).all()
        assert not any(gradient.any() for gradient in self.kinds[1])


@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_several_steps_are_torchs(max_norm: float, weight_decay: float) -> None:
    pair = Pair(SIZES, weight_decay=weight_decay)
    for number, rate in enumerate((0.01, 0.02, 0.005, 0.01), start=1):
        pair.step(number, rate, max_norm)
        pair.check(moved=0.02 * number)


def test_only_parameters_that_are_to_decay_do() -> None:
    pair = Pair(SIZES, weight_decay=3.0, decays=[i % 2 == 0 for i in range(len(SIZES))])
    for number, rate in enumerate((0.01, 0.02, 0.005), start=1):
        pair.step(number, rate, 1e6)
        pair.check(moved=0.02 * number)


def test_tensors_that_begin_anywhere_are_updated_too() -> None:
    pair = Pair([3000, 5], shift=1)
    assert not pair.kernel._aligned
    pair.step(1, 0.01, 1.0)
    pair.check(moved=0.01)


def test_moments_without_memory_are_the_gradient() -> None:
    pair = Pair([100], betas=(0.0, 0.0))
    for number in (1, 2):
        pair.step(number, 0.01, 1.0)
        pair.check(moved=0.02)


def test_a_gradient_whose_square_is_subnormal_moves_as_far_as_any() -> None:
    kinds = [[torch.full((3,), value, device=DEVICE)] for value in (1.0, 1e-19, 0.0, 0.0)]
    norm = torch.tensor(1e-19, device=DEVICE)
    AdamW(*kinds).step(1, norm, rate=0.1, max_norm=1.0, betas=(0.9, 0.999), eps=1e-30, weight_decay=0.0)
    assert kinds[0][0].tolist() == pytest.approx([0.9] * 3, rel=1e-3)


def test_a_number_that_is_not_finite_does_not_pass_for_a_small_norm() -> None:
    kinds = [[torch.ones(3, device=DEVICE)] for _ in range(4)]
    norm = torch.tensor(float("nan"), device=DEVICE)
    AdamW(*kinds).step(1, norm, rate=0.1, max_norm=1.0, **HOW)
    assert kinds[0][0].isnan().all()


def test_tensors_without_elements_take_no_launch() -> None:
    kinds = [[torch.ones(0, device=DEVICE)] for _ in range(4)]
    AdamW(*kinds).step(1, torch.ones((), device=DEVICE), rate=0.1, max_norm=1.0, **HOW)


def test_pieces_of_tensors_with_more_elements_than_32_bits_count() -> None:
    bases = [[2**46], [2**45], [2**44], [2**43]]
    table = pieces(np.array(bases, np.int64), [2**32 + 5])
    assert table.shape == (2**32 // adamw.PIECE + 1, 6)
    assert table[0].tolist() == [2**46, 2**45, 2**44, 2**43, adamw.PIECE, 1]
    assert table[-1].tolist() == [base + 4 * 2**32 for (base,) in bases] + [5, 1]
    assert not pieces(np.array(bases, np.int64), [2**32 + 5], [False])[:, 5].any()
    assert table[:, 4].sum() == 2**32 + 5


def test_which_parameters_are_possible() -> None:
    matrix = torch.zeros(8, 4, device=DEVICE)
    assert AdamW.possible([matrix, matrix[1:]])
    assert not AdamW.possible([matrix, matrix.T])
    assert not AdamW.possible([matrix, matrix.double()])
    assert not AdamW.possible([matrix, matrix.to("meta")])
