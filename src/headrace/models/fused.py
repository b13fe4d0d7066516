"""The ops back end over Triton kernels, for inference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.kernels.gate import gated_silu
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.products import Found, Products
from headrace.kernels.rotate import rotate, rotate_and_write
from headrace.models.attention import AttentionContext, CacheContext
from headrace.models.joined import side_by_side
from headrace.models.ops import ReferenceOps, Rotation

_FOUND: Found = {}
"""What was found for a product's sizes holds for every model of the process."""


class FusedOps(ReferenceOps):
    """`ReferenceOps` with fewer passes over memory and the same rounding. Inference only.

    Norms, the gate and the rotation are kernels without a backward, so they refuse tensors that want gradients.
    q, k, v and gate, up are one product each where their weights lie side by side (`join`). Over a `CacheContext`
    the norm per head, the rotation and the cache's write are one launch, or part of attention's.
    """

    def __init__(self) -> None:
        self._products = Products(_FOUND)

    def tuning(self) -> AbstractContextManager[None]:
        """Within, products of sizes met for the first time are tuned. Not in a capture."""
        return self._products.tuning()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._products.linear(x, weight) if bias is None else F.linear(x, weight, bias)

    def branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Perhaps in parts, which `add_rms_norm` sums."""
        return self._products.linear(x, weight, in_parts=True) if bias is None else F.linear(x, weight, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """Column views of one product where the layers are plain and side by side in memory."""
        plain, weight = _together(layers)
        if weight is None:
            return super().linears(x, layers)
        biases = [layer.bias for layer in plain if layer.bias is not None]
        bias = side_by_side(biases) if len(biases) == len(plain) else None
        _refuse_gradients(x, weight)
        parts = list(self.linear(x, weight, bias).split([layer.out_features for layer in plain], -1))
        if bias is None and biases:
            pairs = zip(parts, plain, strict=True)
            parts = [part if layer.bias is None else part + layer.bias for part, layer in pairs]
        return parts

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        _refuse_gradients(x, weight)
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        _refuse_gradients(x, residual, weight)
        return add_rms_norm(x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        _refuse_gradients(q, k)
        return rotate(q, k, Rotation(cos, sin, None, None, 0.0))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        _refuse_gradients(q, k, v, rotation.q_norm, rotation.k_norm)
        if isinstance(context, CacheContext):
            out = context.attend_projected(layer, q, k, v, rotation)
            if out is not None:
                return out
            q = rotate_and_write(q, k, v, rotation, context.keys(layer), context.values(layer), context.rows)
            return context.attend_cached(layer, q)
        q, k = rotate(q, k, rotation)
        return context.attend(layer, q, k, v)

    def gated(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        """One product where the layers are plain, without biases and side by side in memory; perhaps one kernel."""
        plain, weight = _together((gate, up))
        if weight is None or any(layer.bias is not None for layer in plain):
            return super().gated(x, gate, up)
        _refuse_gradients(x, weight)
        return self._products.gated(x, weight)

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        _refuse_gradients(gate, up)
        return gated_silu(gate, up)


def _together(layers: Sequence[nn.Module]) -> tuple[list[nn.Linear], Tensor | None]:
    """(the plain ones, all layers' weight in one if all are plain and side by side)."""
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    weight = side_by_side([layer.weight for layer in plain]) if len(plain) == len(layers) else None
    return plain, weight


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            "FusedOps is for inference only: its kernels have no backward; run it under torch.no_grad(), "
            "or train over ReferenceOps"
        )
