"""Bits that a kernel promises, where Triton's interpreter computes its products in NumPy.

A row of a product must have the same bits wherever it lies among others. On some CPUs NumPy's library computes a
matrix's last rows or columns by other instructions than the rest; then the interpreter cannot show what the kernel
promises, and values are compared instead, within what rounding allows. Which of the two holds is tried in the
process of the test, on products of the very shapes that its kernels computed, and not told by the CPU's name.
The kernels themselves are asked for their bits on a GPU (tests/gpu/test_same_bits_cuda.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

DRAWS = 16
"""Products tried of each shape: two orders of summation seldom round alike, but now and then they do."""
ROUNDING = 2.0**-24
"""Largest relative error of one rounding to float32."""


class Operand(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    order: str
    """How it lies in memory, C or F: the library is told so and may go another way."""


class Product(NamedTuple):
    left: Operand
    right: Operand
    out_dtype: str


class SameBits:
    """Called with what a kernel computed in two ways; says by `compared` how they were compared."""

    def __init__(self) -> None:
        self.products: set[Product] = set()
        self.compared: str | None = None

    def __call__(self, found: Tensor, expected: Tensor, apart: Tensor | float) -> None:
        """`apart` is by how much two orders of summation may make them differ, for each element or at most."""
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert not found.isnan().any()
        self.compared = "bits" if all(map(treats_places_alike, self.products)) else "values"
        if self.compared == "bits":
            assert torch.equal(found, expected)
        else:
            assert ((found.double() - expected.double()).abs() <= apart).all()


def observed(monkeypatch: pytest.MonkeyPatch) -> SameBits:
    """Notes the products of the interpreter from now on. On a GPU there are none: bits are compared."""
    same_bits = SameBits()
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder

        create_dot = InterpreterBuilder.create_dot

        def noting(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
            same_bits.products.add(Product(_operand(a.data), _operand(b.data), d.data.dtype.name))
            return create_dot(self, a, b, d, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", noting)
    return same_bits


@cache
def treats_places_alike(product: Product) -> bool:
    """Whether a row repeated, times a column repeated, gives one number everywhere."""
    dice = np.random.default_rng(0)
    for _ in range(DRAWS):
        row, column = dice.standard_normal((2, product.left.shape[-1]))
        left, right = _filled(product.left, row[None, :]), _filled(product.right, column[:, None])
        out = np.matmul(left, right, dtype=product.out_dtype)
        if (out != out.flat[0]).any():
            return False
    return True


def _operand(array: np.ndarray) -> Operand:
    return Operand(array.shape, array.dtype.name, "C" if array.flags.c_contiguous else "F")


def _filled(operand: Operand, values: np.ndarray) -> np.ndarray:
    return np.array(np.broadcast_to(values, operand.shape), operand.dtype, order=operand.order)


# ── How far apart two orders of summation are at most ────────────────────────────────────────────────────────────


def share(roundings: int) -> float:
    """Largest relative error of a number that was rounded to float32 so often (Higham's γ)."""
    return roundings * ROUNDING / (1 - roundings * ROUNDING)


def product_apart(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """For x @ weightᵀ + bias, summed in float32 in any two orders and rounded to x's dtype."""
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    summed = share(x.shape[1] + 1) * sizes
    rounded = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps / 2 * (exact.abs() + summed)
    return 2 * (summed + rounded)


def attention_apart(q: Tensor, keys: Tensor, values: Tensor, counted: int) -> float:
    """For attention of any of these queries over up to `counted` of these keys, in float32.

    A score is a sum over the head's elements, so a weight is off by a factor of e to its error. Weights and
    weighted values are sums over the keys, each rescaled whenever a larger score is met, at every key at worst.
    """
    widest = q.double().norm(dim=-1).max() * keys.double().norm(dim=-1).max() / q.shape[-1] ** 0.5
    score = float(widest) * share(q.shape[-1] + 2)
    weights = np.expm1(2 * score) + share(3 * counted)
    return float(2 * (weights + share(3 * counted)) * values.double().abs().max())


def shaken_apart(shaken: Callable[[int], Tensor], plain: Tensor, draws: int = 4) -> float:
    """For a whole model: the most that an output moves when every product is off by as much as it can be.

    `shaken` computes the outputs with errors of random signs, by the number of the draw.
    """
    return max(float((shaken(draw).double() - plain.double()).abs().max()) for draw in range(draws))
