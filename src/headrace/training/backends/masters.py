"""Float32 parameters of a model that computes in another dtype.

masters, float32 ──── cast after each change ───▶ the model's own parameters
       ▲                                                    │
       └──── added to, in float32, as they come ──── gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

ALIGN = 16
"""Bytes, at a multiple of which each cast begins."""


class Masters:
    """Of a model's float32 parameters, which are of `dtype` from here on, and in one block of memory. Where that is
    float32 they stay as they are, and are their own masters.

    Masters are changed in place, not through `data`, and by no one between a pass and its backward pass.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype):
        self.parameters: dict[str, nn.Parameter] = dict(parameters)
        """The masters, under the names given: what an optimizer changes."""
        self._own: list[nn.Parameter] = []
        self._cast_at: list[int] = []
        """How often each master had been changed, as PyTorch counts it."""
        if dtype == torch.float32 or not parameters:
            return
        casts = _in_one_block([parameter.data for parameter in parameters.values()], dtype)
        for (name, parameter), cast in zip(parameters.items(), casts, strict=True):
            master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            parameter.data = cast
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_hand_over(master))
                # For operations that can add to its gradient themselves (`models.trained`).
                parameter.master = master  # type: ignore[attr-defined]
            self.parameters[name] = master
            self._own.append(parameter)

    def drop_unfinished(self) -> None:
        """Forget gradients that a backward pass which failed has not handed over."""
        for parameter in self._own:
            parameter.grad = None

    def cast(self) -> None:
        """The next pass is to compute with what the masters are now."""
        changes = [master._version for master in self.parameters.values()] if self._own else []
        if changes != self._cast_at:
            self._casts()
            self._cast_at = changes

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model's own parameters are the masters, to be saved."""
        if not self._own:
            yield
            return
        cast = [parameter.data for parameter in self._own]
        try:
            for parameter, master in zip(self._own, self.parameters.values(), strict=True):
                parameter.data = master.data
            yield
        finally:
            for parameter, data in zip(self._own, cast, strict=True):
                parameter.data = data

    @cached_property
    def _casts(self) -> Callable[[], None]:
        # Of `data`: a pass whose backward is still to come has the same numbers, and need not know.
        ends = [p.data for p in self._own], [master.data for master in self.parameters.values()]
        if self._own[0].is_cuda:
            from headrace.kernels.cast import Casts

            if all(map(Casts.possible, *ends)):
                return Casts(ends[1], ends[0]).run
        return lambda: torch._foreach_copy_(*ends)


def _in_one_block(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies one behind the other, so that layers of one input are one product (`models.joined.side_by_side`)."""
    step = ALIGN // dtype.itemsize
    sizes = [-(-tensor.numel() // step) * step for tensor in tensors]
    block = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    pairs = zip(block.split(sizes), tensors, strict=True)
    return [place[: tensor.numel()].view(tensor.shape).copy_(tensor) for place, tensor in pairs]


def _hand_over(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(parameter: Tensor) -> None:
        if parameter.grad is None:
            # Some versions of PyTorch also call where a product has added its gradient itself.
            return
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hand_over
