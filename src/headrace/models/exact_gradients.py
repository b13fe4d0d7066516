"""Gradients around forward passes that have none of their own: formulas in float32, products by plain matmuls.

Every function takes the forward pass's implementation (`exact.Forward`) as its first argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from headrace.models.ops import Rotation


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out: Tensor = forward.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_mn = grad.reshape(-1, grad.shape[-1])
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            None,
            (grad_mn @ weight).view_as(x) if wants_x else None,
            grad_mn.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None,
            grad_mn.sum(0) if wants_bias else None,
        )


class RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out: Tensor = forward.rms_norm(x, weight, eps)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return None, *_norm_gradients(x, weight, ctx.eps, grad), None


class AddRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, total = forward.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor, grad_total: Tensor) -> Any:
        total, weight = ctx.saved_tensors
        grad, grad_weight = _norm_gradients(total, weight, ctx.eps, grad_normed)
        grad = grad + grad_total
        return None, grad, grad, grad_weight, None


class GatedSilu(Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out: Tensor = forward.gated_silu(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # Once: with recomputed layers they are gone afterwards.
        saved = ctx.saved_tensors
        dtype = saved[0].dtype
        gate, up = (x.float() for x in saved)
        share, grad = torch.sigmoid(gate), grad.float()
        grad_gate = grad * up * share * (1 + gate * (1 - share))
        return None, grad_gate.to(dtype), (grad * gate * share).to(dtype)


class Rotate(Function):
    """The norm per head, if any, and the rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        normed = (q, k, q_norm, k_norm) if q_norm is not None else (None,) * 4
        ctx.save_for_backward(cos, sin, *normed)
        ctx.eps = eps
        turned: tuple[Tensor, Tensor] = forward.rotate(q, k, Rotation(cos, sin, q_norm, k_norm, eps))
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        cos, sin, q, k, q_norm, k_norm = ctx.saved_tensors
        grad_q, grad_k = (_turned_back(grad, cos, sin) for grad in (grad_q, grad_k))
        grad_q_norm = grad_k_norm = None
        if q_norm is not None:
            grad_q, grad_q_norm = _norm_gradients(q, q_norm, ctx.eps, grad_q)
            grad_k, grad_k_norm = _norm_gradients(k, k_norm, ctx.eps, grad_k)
        dtype = cos.dtype
        return None, grad_q.to(dtype), grad_k.to(dtype), None, None, grad_q_norm, grad_k_norm, None


class Attend(Function):
    """Gradients are those of the context's own attention, which is computed once more for them."""

    @staticmethod
    def forward(
        ctx: Any, forward: Any, q: Tensor, k: Tensor, v: Tensor, work: Any, layer: int, context: Any
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.layer, ctx.context = layer, context
        out: Tensor = forward.attend(q, k, v, work)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.context.attend(ctx.layer, q, k, v)
        return None, *torch.autograd.grad(out, (q, k, v), grad), None, None, None


def _norm_gradients(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(of x, of the weight), from the gradient of `ReferenceOps.rms_norm`'s result."""
    x32, grad32 = x.float(), grad.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    normed = x32 * scale
    grad_weight = (grad32 * normed).flatten(0, -2).sum(0)
    grad32 = grad32 * weight.float()
    grad_x = scale * (grad32 - normed * (grad32 * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _turned_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Float32: the gradient before the rotation. Swapping halves is its own inverse."""
    grad = grad.float()
    return grad * cos + (grad * sin).roll(grad.shape[-1] // 2, -1)
