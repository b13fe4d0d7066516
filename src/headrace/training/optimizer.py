"""AdamW with the gradient's clipping, and its learning rate as a pure function of the step."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from headrace.training.config import OptimizerConfig, Undecayed

if TYPE_CHECKING:
    from headrace.kernels.adamw import AdamW

# The names under which torch's AdamW keeps a parameter's state, and so do checkpoints.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_State = Mapping[Tensor, Mapping[str, Tensor]]


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of step 0, 1, … of a run of `total_steps`.

    The rise reaches the full rate at its last step; the fall starts from it at the step after and would reach
    `final_fraction` at step `total_steps`, just past the end.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)


def undecayed(
    parameters: Mapping[str, Tensor], embeddings: Collection[str], spared: Collection[Undecayed]
) -> set[str]:
    """The names of the parameters that have no weight decay.

    Each is of one kind. An embedding is one of `embeddings`, also where it is the output head too. A bias is called
    so. What else has one dimension, such as the scale of a norm, counts as a norm. All others always decay.
    """

    def kind(name: str, parameter: Tensor) -> Undecayed | None:
        if name in embeddings:
            return "embeddings"
        if name.endswith("bias"):
            return "biases"
        return "norms" if parameter.ndim < 2 else None

    return {name for name, parameter in parameters.items() if kind(name, parameter) in spared}


class Optimizer:
    """AdamW over those of the named float32 parameters that want gradients. These exist from the beginning and are
    added to in place."""

    def __init__(
        self, parameters: Mapping[str, Parameter], config: OptimizerConfig, *, undecayed: Collection[str] = ()
    ):
        """`undecayed`: names of those that have no weight decay."""
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        decays = [name not in undecayed for name in self._parameters]
        self._adamw = _adamw(list(self._parameters.values()), config, decays)
        self._norm: Tensor | None = None

    def norm(self) -> Tensor:
        """The gradient's norm, still on the device: what the next step clips by."""
        self._norm = torch.nn.utils.get_total_norm(_gradients(self._parameters.values()), foreach=True)
        return self._norm

    def step(self, rate: float) -> None:
        """One update with the gradients there are, scaled down to `max_grad_norm`; then none. Their norm is what
        `norm` found, if it was asked for since the last step."""
        self._adamw.step(rate, self.norm() if self._norm is None else self._norm)
        self._norm = None
        # Kernels do not tell; whoever keeps a copy of the parameters looks at this.
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    def zero_grad(self) -> None:
        # Kept and zeroed: a parameter without a gradient would be left out of the update, momentum and all.
        torch._foreach_zero_(_gradients(self._parameters.values()))
        self._norm = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything it remembers, by name: empty before the first step."""
        state = self._adamw.state()
        return {
            f"{key}/{name}": state[parameter][key]
            for name, parameter in self._parameters.items()
            if parameter in state
            for key in (*_MOMENTS, _STEP)
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` gave."""
        # What there was is freed first: twice the moments may be more than the device has.
        self._adamw.load({})
        self.zero_grad()
        if not tensors:
            return
        self._adamw.load(
            {
                parameter: {
                    key: tensors[f"{key}/{name}"].to(parameter.device, copy=True) for key in (*_MOMENTS, _STEP)
                }
                for name, parameter in self._parameters.items()
            }
        )


class _Torch:
    """torch's own, wherever the parameters are."""

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, decays: Sequence[bool]):
        self._parameters = parameters
        self._max_norm = config.max_grad_norm
        groups = [
            {"params": members, "weight_decay": weight_decay}
            for flag, weight_decay in ((True, config.weight_decay), (False, 0.0))
            if (members := [p for p, decays_too in zip(parameters, decays, strict=True) if decays_too is flag])
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def step(self, rate: float, norm: Tensor) -> None:
        """Clip by the norm, update, zero the gradients."""
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_norm, norm, foreach=True)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        torch._foreach_zero_(_gradients(self._parameters))

    def state(self) -> _State:
        """Moments and step count of each parameter; empty before the first step."""
        return self._adamw.state

    def load(self, state: _State) -> None:
        """Go on from what `state` gave."""
        self._adamw.state.clear()
        self._adamw.state.update({parameter: dict(own) for parameter, own in state.items()})


class _Kernel:
    """The same in one launch, by `kernels.adamw`."""

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, decays: Sequence[bool]):
        self._parameters, self._config = parameters, config
        self._decays = dict(zip(parameters, decays, strict=True))
        self._adamw: AdamW | None = None
        self._gradients: list[Tensor] = []
        self.load({})

    def step(self, rate: float, norm: Tensor) -> None:
        gradients = _gradients(self._parameters)
        if self._adamw is None or any(map(operator.is_not, gradients, self._gradients)):
            self._gradients = gradients
            self._adamw = self._over_all()
        self._steps += 1
        self._adamw.step(
            self._steps,
            norm,
            rate=rate,
            betas=self._config.betas,
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
            max_norm=self._config.max_grad_norm,
        )

    def state(self) -> _State:
        return {
            parameter: {
                **dict(zip(_MOMENTS, moments, strict=True)),
                _STEP: torch.full((), self._steps, dtype=torch.float32, device=parameter.device),
            }
            for parameter, moments in self._moments.items()
        }

    def load(self, state: _State) -> None:
        self._moments = {parameter: [own[key] for key in _MOMENTS] for parameter, own in state.items()}
        # The same for all: each step is of all of them.
        self._steps = max((int(own[_STEP]) for own in state.values()), default=0)
        self._adamw = None

    def _over_all(self) -> AdamW:
        from headrace.kernels.adamw import AdamW

        if not self._moments:
            self._moments = {p: [torch.zeros_like(p) for _ in _MOMENTS] for p in self._parameters}
        firsts, seconds = zip(*(self._moments[parameter] for parameter in self._parameters), strict=True)
        decays = [self._decays[parameter] for parameter in self._parameters]
        return AdamW(self._parameters, self._gradients, firsts, seconds, decays)


def _adamw(parameters: Sequence[Parameter], config: OptimizerConfig, decays: Sequence[bool]) -> _Torch | _Kernel:
    if all(parameter.is_cuda for parameter in parameters):
        from headrace.kernels.adamw import AdamW

        if AdamW.possible(parameters):
            return _Kernel(parameters, config, decays)
    return _Torch(parameters, config, decays)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
