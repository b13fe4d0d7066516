"""How far a student's distributions are from a teacher's, without ever holding all logits. Formulas:
docs/off-policy.md.

Shape letters: T tokens, D and E hidden sizes of student and teacher, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headrace.models.logprobs import CHUNK_ELEMENTS, Chunk, Support, chunks_of, head_logits

Divergence = Literal["forward", "reverse", "jsd"]


class Said(NamedTuple):
    """What a teacher says of each token. Nothing here gets a gradient."""

    hidden_te: Tensor
    head_weight_ve: Tensor


class _How(NamedTuple):
    divergence: Divergence
    beta: float


def divergences(
    hidden_td: Tensor,
    head_weight_vd: Tensor,
    teacher: Said,
    temperature: Tensor | float = 1.0,
    support: Support | tuple[Tensor, Tensor] | None = None,
    *,
    divergence: Divergence = "reverse",
    beta: float = 0.5,
    chunk_rows: int | None = None,
) -> Tensor:
    """(T,) float32, between softmax(logits / temperature) of student and teacher over each row's support.

    Differentiable once in the student's hidden states and head. At most `chunk_rows` rows of both logits exist at a
    time; the backward pass computes them again.
    """
    # One tokenizer, and rows that stand for no token of it after its own: models of a family differ in these.
    common = min(len(head_weight_vd), len(teacher.head_weight_ve))
    head_weight_vd, teacher = head_weight_vd[:common], Said(teacher.hidden_te, teacher.head_weight_ve[:common])
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // (2 * head_weight_vd.shape[0]))
    ids, offsets = support if support is not None else (None, None)
    none_t = torch.zeros(len(hidden_td), dtype=torch.long, device=hidden_td.device)
    chunks = chunks_of(none_t, temperature, ids, offsets, rows)
    found: Tensor = _Divergences.apply(hidden_td, head_weight_vd, teacher, chunks, _How(divergence, beta))
    return found


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_td: Tensor, head_weight_vd: Tensor, teacher: Said, chunks: list[Chunk], how: _How
    ) -> Tensor:
        found_t = hidden_td.new_empty(len(hidden_td), dtype=torch.float32)
        for chunk in chunks:
            student_cv, teacher_cv = _both(chunk, hidden_td, head_weight_vd, teacher)
            found_t[chunk.rows] = _divergence(student_cv, teacher_cv, how)
        ctx.save_for_backward(hidden_td, head_weight_vd)
        ctx.teacher, ctx.chunks, ctx.how = teacher, chunks, how
        return found_t

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_td, head_weight_vd = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_td) if wants_hidden else None
        grad_head = torch.zeros_like(head_weight_vd, dtype=torch.float32) if wants_head else None
        for chunk in ctx.chunks:
            student_cv, teacher_cv = _both(chunk, hidden_td, head_weight_vd, ctx.teacher)
            slope_cv = _slope(student_cv, teacher_cv, ctx.how).mul_(grads[0][chunk.rows, None])
            if isinstance(chunk.temperature, Tensor) or chunk.temperature != 1.0:
                slope_cv.div_(chunk.temperature)
            low_cv = slope_cv.to(head_weight_vd.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk.rows] = low_cv @ head_weight_vd
            if grad_head is not None:
                grad_head.add_(low_cv.t() @ hidden_td[chunk.rows])
        if grad_head is not None:
            grad_head = grad_head.to(head_weight_vd.dtype)
        return grad_hidden, grad_head, None, None, None


def _both(chunk: Chunk, hidden_td: Tensor, head_weight_vd: Tensor, teacher: Said) -> tuple[Tensor, Tensor]:
    """Log-probs (C, V) of student and teacher; about -1e30 outside the support, in both."""
    student_cv = chunk.log_softmax(head_logits(hidden_td[chunk.rows], head_weight_vd))
    return student_cv, chunk.log_softmax(head_logits(teacher.hidden_te[chunk.rows], teacher.head_weight_ve))


def _divergence(student_cv: Tensor, teacher_cv: Tensor, how: _How) -> Tensor:
    if how.divergence == "reverse":
        return torch.linalg.vecdot(student_cv.exp(), student_cv - teacher_cv)
    if how.divergence == "forward":
        return torch.linalg.vecdot(teacher_cv.exp(), teacher_cv - student_cv)
    between_cv = _between(student_cv, teacher_cv, how.beta)
    towards_student = torch.linalg.vecdot(student_cv.exp(), student_cv - between_cv)
    towards_teacher = torch.linalg.vecdot(teacher_cv.exp(), teacher_cv - between_cv)
    return how.beta * towards_teacher + (1 - how.beta) * towards_student


def _slope(student_cv: Tensor, teacher_cv: Tensor, how: _How) -> Tensor:
    """d divergence / d (the student's logits / temperature)."""
    probs_cv = student_cv.exp()
    if how.divergence == "forward":
        return probs_cv - teacher_cv.exp()
    # Of a probability, up to a constant: with softmax only the difference from the mean counts.
    if how.divergence == "reverse":
        own_cv = student_cv - teacher_cv
    else:
        own_cv = (student_cv - _between(student_cv, teacher_cv, how.beta)).mul_(1 - how.beta)
    return probs_cv * (own_cv - torch.linalg.vecdot(probs_cv, own_cv)[:, None])


def _between(student_cv: Tensor, teacher_cv: Tensor, beta: float) -> Tensor:
    """The logarithm of the mixture beta · teacher + (1 − beta) · student."""
    return torch.logaddexp(teacher_cv + math.log(beta), student_cv + math.log1p(-beta))
