"""The ops back end whose results are the same bits in training and in the engine.

A token's hidden state and log-prob depend on its own sequence alone: not on what else is in the pass, on how the
sequence was cut into passes, on the number of threads, nor on who computes. Forward passes are `exact_kernels` on
CUDA and `exact_plain` elsewhere; gradients are the reference's within rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headrace.models import exact_plain
from headrace.models.attention import AttentionContext, CacheContext, CachedContext, PackedContext, Spans
from headrace.models.exact_gradients import AddRmsNorm, Attend, GatedSilu, Linear, RmsNorm, Rotate
from headrace.models.joined import side_by_side
from headrace.models.logprobs import Score, Support, token_logprobs
from headrace.models.ops import Rotation

EVEN = 16
"""Projections are joined where their widths are multiples of it: then a kernel reads a part of the product as it
reads a product of its own, and sums in the same order."""


class Forward(Protocol):
    """The forward passes. No gradients; a row's result does not depend on the other rows, bit for bit."""

    def linear(self, x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def rotate(self, q_thd: Tensor, k_tgd: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]: ...

    def plan(self, spans: Spans, heads: int, groups: int, device: torch.device) -> Any:
        """What `attend` has to do, the same for all layers."""
        ...

    def attend(self, q_thd: Tensor, keys: Tensor, values: Tensor, work: Any) -> Tensor: ...

    @property
    def score(self) -> Score | None:
        """None: the log-softmax, which is the engine's too."""
        ...


class ExactOps:
    """Over a `PackedContext` for training; over a `CachedContext` or a `CacheContext` for inference only.

    Any other context attends by itself and is as exact as that. A `CacheContext` must be invariant. Projections
    that are no plain `nn.Linear` are called and not exact. `kernels` chooses the Triton kernels or plain PyTorch;
    None: the kernels on CUDA.
    """

    def __init__(self, kernels: bool | None = None):
        self._kernels = kernels

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = Linear.apply(self._forward(x), x, weight, bias)
        return out

    def branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, weight, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """Where no gradient is wanted, one product of layers that lie side by side: the bits are the same."""
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        if len(plain) == len(layers) and self._uses_kernels(x) and not wants_gradient(x, plain[0].weight):
            weight = side_by_side([layer.weight for layer in plain])
            biases = [layer.bias for layer in plain if layer.bias is not None]
            bias = side_by_side(biases) if len(biases) == len(plain) else None
            even = all(layer.out_features % EVEN == 0 for layer in plain)
            if even and weight is not None and (bias is not None or not biases):
                return list(self.linear(x, weight, bias).split([layer.out_features for layer in plain], -1))
        return [self.linear(x, one.weight, one.bias) if type(one) is nn.Linear else one(x) for one in layers]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = RmsNorm.apply(self._forward(x), x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = AddRmsNorm.apply(self._forward(x), x, residual, weight, eps)
        return normed, total

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotate(q, k, Rotation(cos, sin, None, None, 0.0))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        if isinstance(context, CacheContext) and self._uses_kernels(q):
            from headrace.kernels.rotate import rotate_and_write

            _refuse_gradients(context, q, k, v)
            cache = context.keys(layer), context.values(layer), context.rows
            return context.attend_cached(layer, rotate_and_write(q, k, v, rotation, *cache))
        q, k = self._rotate(q, k, rotation)
        forward, heads, groups = self._forward(q), q.shape[1], k.shape[1]
        if isinstance(context, PackedContext):
            key = (forward, heads, groups)
            if key not in context.kept:
                context.kept[key] = forward.plan(context.spans, heads, groups, q.device)
            out: Tensor = Attend.apply(forward, q, k, v, context.kept[key], layer, context)
            return out
        if isinstance(context, CachedContext):
            _refuse_gradients(context, q, k, v)
            keys, values = context.extend(layer, k, v)
            own = (0, len(q), len(keys) - len(q), 0)
            work = forward.plan(Spans(*(np.array([number]) for number in own)), heads, groups, q.device)
            return forward.attend(q, keys, values, work)
        return context.attend(layer, q, k, v)

    def gated(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        return self.gated_silu(*self.linears(x, (gate, up)))

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = GatedSilu.apply(self._forward(gate), gate, up)
        return out

    def logits(self, hidden: Tensor, head_weight: Tensor) -> Tensor:
        return self.linear(hidden, head_weight, None)

    def token_logprobs(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        temperature: Tensor | float = 1.0,
        support: Support | tuple[Tensor, Tensor] | None = None,
        *,
        chunk_rows: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        forward = self._forward(hidden)
        if not isinstance(temperature, Tensor):
            if temperature <= 0:
                raise ValueError(f"temperature must be positive to define a distribution, got {temperature}")
            temperature = torch.full((len(targets),), temperature, device=hidden.device)
        return token_logprobs(
            hidden,
            head_weight,
            targets,
            temperature.to(torch.float32).contiguous(),
            support,
            chunk_rows=chunk_rows,
            linear=lambda rows_cd, head_vd: forward.linear(rows_cd, head_vd, None),
            score=forward.score,
        )

    def _rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        q, k = Rotate.apply(self._forward(q), q, k, *rotation)
        return q, k

    def _uses_kernels(self, x: Tensor) -> bool:
        return x.is_cuda if self._kernels is None else self._kernels

    def _forward(self, x: Tensor) -> Forward:
        if not self._uses_kernels(x):
            return exact_plain
        from headrace.models import exact_kernels

        return exact_kernels


def wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _refuse_gradients(context: AttentionContext, *tensors: Tensor) -> None:
    if wants_gradient(*tensors):
        raise RuntimeError(
            f"over a {type(context).__name__} exact attention is for inference only: run it under "
            "torch.no_grad(), or train over a PackedContext"
        )
