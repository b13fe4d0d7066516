"""The ops back end over Triton kernels that can be differentiated, for training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.kernels import gate, gradients, head, norm, rotate
from headrace.models.attention import AttentionContext
from headrace.models.joined import abreast, side_by_side
from headrace.models.logprobs import Support, head_logits, token_logprobs
from headrace.models.ops import ReferenceOps, Rotation

# Of a device's memory, for the logits of one pass: within it they are computed once, beyond it once more for the
# backward pass, in pieces.
LOGITS_SHARE = 12
CHUNK_BYTES = 2**29


class TrainedOps(ReferenceOps):
    """`ReferenceOps` with fewer passes over memory, forward and backward, and the same rounding forward.

    A weight may have a `master`: a float32 tensor with a gradient, to which the weight's own is then added by the
    kernel that computes it, in place of being given to autograd.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            return super().linear(x, weight, bias)
        (found,) = _Linears.apply(x, weight)
        return found

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        if not all(type(layer) is nn.Linear and layer.bias is None for layer in layers):
            return super().linears(x, layers)
        return list(_Linears.apply(x, *(layer.weight for layer in layers)))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: Tensor = _Norm.apply(x, weight, eps)
        return found

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = _AddNorm.apply(x, residual, weight, eps)
        return normed, total

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        q, k = _Rotate.apply(q, k, *rotation)
        return context.attend(layer, q, k, v)

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        found: Tensor = _Gate.apply(gate, up)
        return found

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
        """Rows that have a support go the reference's way, all of a pass together."""
        if support is not None:
            return token_logprobs(hidden, head_weight, targets, temperature, support, chunk_rows=chunk_rows)
        if not isinstance(temperature, Tensor):
            temperature = torch.full(targets.shape, temperature, dtype=torch.float32, device=hidden.device)
        rows = chunk_rows or _rows_at_once(len(targets), len(head_weight), hidden.device)
        logprobs, entropy = _Head.apply(hidden, head_weight, targets.long(), temperature.float(), rows)
        return logprobs, entropy


def _rows_at_once(rows: int, vocabulary: int, device: torch.device) -> int:
    row_bytes = 4 * vocabulary
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory // LOGITS_SHARE
        if rows * row_bytes <= room:
            return max(1, rows)
    return max(1, CHUNK_BYTES // row_bytes)


def _weight_gradient(grad_tn: Tensor, x_tk: Tensor, master: Tensor | None) -> Tensor | None:
    """gradᵀ x, or None where the master has got it."""
    if master is None or master.grad is None:
        return grad_tn.t() @ x_tk
    if grad_tn.is_cuda and grad_tn.dtype != torch.float32:
        torch.addmm(master.grad, grad_tn.t(), x_tk, out_dtype=torch.float32, out=master.grad)
    else:
        master.grad.addmm_(grad_tn.t().float(), x_tk.float())
    return None


def _norm_weight_gradient(parts: Tensor | None, weight: Tensor | None, master: Tensor | None) -> Tensor | None:
    """The sum of the parts, or None where the master has got it or there is none."""
    if parts is None or weight is None:
        return None
    if master is None or master.grad is None:
        return parts.sum(0).to(weight.dtype)
    gradients.add_parts(parts, master.grad)
    return None


def _master(weight: Tensor | None) -> Tensor | None:
    return getattr(weight, "master", None)


def _joined(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs, neighbours as one where their gradients are columns of one matrix and their weights rows of one."""
    found: list[tuple[Tensor, Tensor]] = []
    for grad, weight in zip(grads, weights, strict=True):
        if found:
            columns, rows = abreast((found[-1][0], grad)), side_by_side((found[-1][1], weight))
            if columns is not None and rows is not None:
                found[-1] = columns, rows
                continue
        found.append((grad, weight))
    return found


def _places(*inputs_tn: Tensor) -> tuple[Tensor, ...]:
    """New matrices for the inputs' gradients, abreast where the inputs are: then `_Linears` can join them."""
    if abreast(inputs_tn) is None:
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs_tn)
    widths = [x.shape[1] for x in inputs_tn]
    return inputs_tn[0].new_empty(len(inputs_tn[0]), sum(widths)).split(widths, 1)


class _Linears(torch.autograd.Function):
    """Several products of one input, whose gradient is added up within the products.

    One product where the weights lie side by side: the results are its columns then.
    """

    @staticmethod
    def forward(ctx: Any, x_td: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_td, *weights)
        ctx.masters = [_master(weight) for weight in weights]
        together = side_by_side(weights) if len(weights) > 1 else None
        if together is None:
            return tuple(F.linear(x_td, weight) for weight in weights)
        return F.linear(x_td, together).split([weight.shape[0] for weight in weights], 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x_td, *weights = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            (first, weight), *others = _joined(grads, weights)
            grad_x = first @ weight
            for other, weight in others:
                grad_x.addmm_(other, weight)
        wanted = zip(ctx.needs_input_grad[1:], grads, ctx.masters, strict=True)
        return grad_x, *(_weight_gradient(grad, x_td, master) if wants else None for wants, grad, master in wanted)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.master = eps, _master(weight)
        return norm.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        rows = norm.as_rows(x).contiguous()
        given = grads[0].reshape(rows.shape).contiguous()
        grad_x, parts = gradients.norm_gradient(rows, weight, ctx.eps, given, None)
        wanted = parts if ctx.needs_input_grad[1] else None
        return grad_x.view(x.shape), _norm_weight_gradient(wanted, weight, ctx.master), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = norm.add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.master = eps, _master(weight)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, weight = ctx.saved_tensors
        of_normed, of_total = (grad.contiguous() for grad in grads)
        grad, parts = gradients.norm_gradient(total, weight, ctx.eps, of_normed, of_total)
        wanted = parts if ctx.needs_input_grad[2] else None
        return grad, grad, _norm_weight_gradient(wanted, weight, ctx.master), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, cos, sin, q_norm, k_norm)
        ctx.eps, ctx.masters = eps, (_master(q_norm), _master(k_norm))
        return rotate.rotate(q, k, (cos, sin, q_norm, k_norm, eps))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, cos, sin, q_norm, k_norm = ctx.saved_tensors
        given = grads[0].contiguous(), grads[1].contiguous()
        places = _places(q.flatten(1), k.flatten(1))
        found = places[0].view(q.shape), places[1].view(k.shape)
        of_norms = gradients.rotate_gradient(q, k, (cos, sin, q_norm, k_norm, ctx.eps), given, found)
        wanted = zip(ctx.needs_input_grad[4:6], of_norms, (q_norm, k_norm), ctx.masters, strict=True)
        weights = [_norm_weight_gradient(parts if wants else None, *both) for wants, parts, *both in wanted]
        return *found, None, None, *weights, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_rows: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_rows, up)
        return gate.gated_silu(gate_rows, up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate_rows, up = ctx.saved_tensors
        found = _places(norm.as_rows(gate_rows), norm.as_rows(up))
        gradients.gate_gradient(gate_rows, up, grads[0], found)
        return tuple(one.view(up.shape) for one in found)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_td: Tensor, head_vd: Tensor, targets_t: Tensor, temperature_t: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        pieces, kept = [], None
        for start in range(0, max(1, len(targets_t)), rows):
            part = slice(start, start + rows)
            kept = head_logits(hidden_td[part], head_vd)
            pieces.append(head.target_logprobs(kept, targets_t[part], temperature_t[part]))
        logprobs_t, entropy_t, total_t = (torch.cat(column) for column in zip(*pieces, strict=True))
        ctx.save_for_backward(
            hidden_td, head_vd, targets_t, temperature_t, entropy_t, total_t, kept if len(pieces) == 1 else None
        )
        ctx.rows, ctx.master = rows, _master(head_vd)
        return logprobs_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_td, head_vd, targets_t, temperature_t, entropy_t, total_t, kept = ctx.saved_tensors
        given = [grad.contiguous() for grad in grads]
        grad_hidden = torch.empty_like(hidden_td)
        grad_head: Tensor | None = None
        for start in range(0, len(targets_t), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = head_logits(hidden_td[part], head_vd) if kept is None else kept
            columns = [one[part] for one in (targets_t, temperature_t, entropy_t, total_t, *given)]
            grad_logits = head.logits_gradient(logits, *columns, dtype=head_vd.dtype)
            del logits
            grad_hidden[part] = grad_logits @ head_vd
            if ctx.needs_input_grad[1]:
                added = _weight_gradient(grad_logits, hidden_td[part], ctx.master)
                grad_head = added if grad_head is None or added is None else grad_head.float().add_(added)
        return grad_hidden, None if grad_head is None else grad_head.to(head_vd.dtype), None, None, None
