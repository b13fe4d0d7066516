"""AdamW, its learning rate as a pure function of the step, and the gradient's clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from headrace.training.config import OptimizerConfig

# The names under which AdamW keeps a parameter's state.
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


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


class Optimizer:
    """AdamW over those of the named float32 parameters that want gradients. These exist from the beginning and are
    added to in place."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig):
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._config = config
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def clip(self) -> torch.Tensor:
        """Scale the gradient down to `max_grad_norm`; returns its norm before, still on the device."""
        return torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm, foreach=True)

    def step(self, rate: float) -> None:
        """One update with the gradients there are, then none."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        # The fused kernel does not tell; whoever keeps a copy of the parameters looks at this.
        torch.autograd.graph.increment_version(list(self._parameters.values()))
        self.zero_grad()

    def zero_grad(self) -> None:
        # Kept and zeroed: a parameter without a gradient would be left out of the update, momentum and all.
        torch._foreach_zero_([p.grad for p in self._parameters.values() if p.grad is not None])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything it remembers, by name: empty before the first step."""
        return {
            f"{key}/{name}": self._adamw.state[parameter][key]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for key in (*_MOMENTS, _STEP)
        }

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what `tensors` gave."""
        self._adamw.state.clear()
        self.zero_grad()
        if not tensors:
            return
        for name, parameter in self._parameters.items():
            moments = {key: tensors[f"{key}/{name}"].to(parameter.device, copy=True) for key in _MOMENTS}
            step = tensors[f"{_STEP}/{name}"].to(parameter.device, copy=True)
            self._adamw.state[parameter] = {_STEP: step, **moments}
