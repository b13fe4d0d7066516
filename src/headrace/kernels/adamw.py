"""AdamW over many tensors in one launch: the gradient scaled by its norm, the update, and the gradient zeroed.
The reference is `torch.nn.utils.clip_grad_norm_`, then `torch.optim.AdamW`.

Memory's bandwidth is what it takes: each of the four tensors is read once and written once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.digest import ALIGN, plan

PIECE = 16 * 1024
"""Elements of a program."""
AT_ONCE = 2048
"""Elements of a turn of its loop."""
_WIDTH = tl.constexpr(6)
"""Of the table: where parameter, gradient, first and second moment are, how many elements, whether they decay."""


class AdamW:
    """Of these tensors, again and again, by a table made once. On the current stream."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        decays: Sequence[bool] | None = None,
    ):
        """As many of each, in one order, each kind as in `possible`; `firsts` and `seconds` are the moments.
        `decays` says of each parameter whether it has weight decay; None: all have."""
        kinds = parameters, gradients, firsts, seconds
        # Kept: the table has their addresses alone.
        self._tensors = [[tensor.detach() for tensor in kind] for kind in kinds]
        addresses = np.array([[tensor.data_ptr() for tensor in kind] for kind in kinds], np.int64)
        rows = pieces(addresses, [parameter.numel() for parameter in parameters], decays)
        self._table = torch.from_numpy(rows).to(parameters[0].device)
        self._aligned = not (addresses % ALIGN).any()

    @staticmethod
    def possible(tensors: Sequence[Tensor]) -> bool:
        """Whether they can be its parameters: float32, contiguous and on one device."""
        alike = len({tensor.device for tensor in tensors}) == 1
        return alike and all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)

    def step(
        self,
        number: int,
        norm: Tensor,
        *,
        rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_norm: float,
    ) -> None:
        """Update `number` 1, 2, … with the gradients there are, whose norm (one float32, on the device) is clipped
        to `max_norm`; then they are zero."""
        if not len(self._table):
            return
        first, second = betas
        # In float64, and 1 - beta too: of a float32 beta little of it would be left.
        numbers = (
            max_norm,
            first,
            1 - first,
            second,
            1 - second,
            (1 - second**number) ** -0.5,
            eps,
            rate / (1 - first**number),
            rate * weight_decay,
        )
        with torch.cuda.device_of(self._table):
            # Floats, as an integer's value may be compiled in.
            _adamw[(len(self._table),)](
                self._table, norm, *map(float, numbers), ALIGNED=self._aligned, AT_ONCE=AT_ONCE, num_warps=8
            )


def pieces(addresses: np.ndarray, sizes: Sequence[int], decays: Sequence[bool] | None = None) -> np.ndarray:
    """(pieces, `_WIDTH`), int64: the table, given the addresses (4, tensors), the tensors' elements and whether
    they decay; None: all do."""
    item = torch.float32.itemsize
    plans = [plan(kind.tolist(), [item * size for size in sizes], item * PIECE) for kind in addresses]
    counts = [-(-size // PIECE) for size in sizes]
    decaying = np.repeat([True] * len(sizes) if decays is None else list(decays), counts)
    return np.stack([*(one[:, 0] for one in plans), plans[0][:, 1] // item, decaying], axis=1).astype(np.int64)


@triton.jit
def _adamw(
    table, norm, max_norm, keep_first, add_first, keep_second, add_second, unbias, eps, rate, decay,
    ALIGNED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = table + _WIDTH * tl.program_id(0)
    parameter = tl.load(row).to(tl.pointer_type(tl.float32))
    gradient = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    first = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    second = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 4).to(tl.int32)
    decay = decay * tl.load(row + 5).to(tl.float32)
    if ALIGNED:
        parameter, gradient = tl.multiple_of(parameter, 16), tl.multiple_of(gradient, 16)
        first, second = tl.multiple_of(first, 16), tl.multiple_of(second, 16)
    scale = max_norm / (tl.load(norm) + 1e-6)
    scale = tl.where(scale > 1.0, 1.0, scale)
    # Without a mask as far as that goes: with one, elements are read one by one.
    whole = count // AT_ONCE * AT_ONCE
    for start in tl.range(0, whole, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        _update(
            parameter + at, gradient + at, first + at, second + at, None,
            scale, keep_first, add_first, keep_second, add_second, unbias, eps, rate, decay,
        )  # fmt: skip
    at = whole + tl.arange(0, AT_ONCE)
    _update(
        parameter + at, gradient + at, first + at, second + at, at < count,
        scale, keep_first, add_first, keep_second, add_second, unbias, eps, rate, decay,
    )  # fmt: skip


@triton.jit
def _update(
    parameter, gradient, first, second, real,
    scale, keep_first, add_first, keep_second, add_second, unbias, eps, rate, decay,
):  # fmt: skip
    grad = tl.load(gradient, real) * scale
    mean = keep_first * tl.load(first, real) + add_first * grad
    square = keep_second * tl.load(second, real) + add_second * grad * grad
    value = tl.load(parameter, real)
    # Rounded once: the decay alone is often less than half of what the parameter can change by. The other root
    # takes subnormal numbers for zero, which an epsilon as small would not survive.
    value -= decay * value + rate * mean / (tl.sqrt_rn(square) * unbias + eps)
    tl.store(parameter, value, real)
    tl.store(first, mean, real)
    tl.store(second, square, real)
    tl.store(gradient, tl.zeros_like(grad), real)
