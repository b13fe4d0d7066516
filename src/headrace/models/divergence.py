"""How far a student's distributions are from a teacher's, without ever holding all logits. Formulas:
docs/off-policy.md.

Shape letters: T tokens, D and E hidden sizes of student and teacher, V vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headrace.models.logprobs import CHUNK_ELEMENTS, Chunk, Support, chunks_of, head_logits

Divergence = Literal["forward", "reverse", "jsd"]

# What lies between a chunk's logits and its sums is of so many elements at a time: what a cache holds, or on a GPU
# what makes a launch worth while.
_PART_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
# Beyond it one of two probabilities is nothing beside the other; its exponential is finite in float32.
_FAR = 80.0


class Said(NamedTuple):
    """What a teacher says of each token. Nothing here gets a gradient."""

    hidden_te: Tensor
    head_weight_ve: Tensor


class _How(NamedTuple):
    divergence: Divergence
    beta: float
    vocabulary: int
    """Rows of the larger head: a support's ids are below it."""


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
    """(T,) between softmax(logits / temperature) of student and teacher over each row's support: float64 where the
    student's hidden states are, and float32 otherwise. Never below 0.

    Ids that only one of the two has rows for are left out, of a support too; where that leaves none it is 0.
    Differentiable once in the student's hidden states and head. At most `chunk_rows` rows of both logits exist at a
    time; the backward pass computes them again.
    """
    # One tokenizer, and rows that stand for no token of it after its own: models of a family differ in these.
    common, vocabulary = sorted((len(head_weight_vd), len(teacher.head_weight_ve)))
    head_weight_vd, teacher = head_weight_vd[:common], Said(teacher.hidden_te, teacher.head_weight_ve[:common])
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // (2 * head_weight_vd.shape[0]))
    ids, offsets = support if support is not None else (None, None)
    none_t = torch.zeros(len(hidden_td), dtype=torch.long, device=hidden_td.device)
    chunks = chunks_of(none_t, temperature, ids, offsets, rows)
    how = _How(divergence, beta, vocabulary)
    found: Tensor = _Divergences.apply(hidden_td, head_weight_vd, teacher, chunks, how)
    return found


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_td: Tensor, head_weight_vd: Tensor, teacher: Said, chunks: list[Chunk], how: _How
    ) -> Tensor:
        found_t = hidden_td.new_empty(len(hidden_td), dtype=_wide(hidden_td))
        for chunk in chunks:
            both = _both(chunk, hidden_td, head_weight_vd, teacher, how)
            found_t[chunk.rows] = torch.cat([_divergence(part, how) for part in both.parts()])
        ctx.save_for_backward(hidden_td, head_weight_vd)
        ctx.teacher, ctx.chunks, ctx.how = teacher, chunks, how
        return found_t

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_td, head_weight_vd = ctx.saved_tensors
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_td) if wants_hidden else None
        grad_head = torch.zeros_like(head_weight_vd, dtype=_wide(head_weight_vd)) if wants_head else None
        for chunk in ctx.chunks:
            both = _both(chunk, hidden_td, head_weight_vd, ctx.teacher, ctx.how)
            for part in both.parts():
                _to_slope(part, ctx.how)
            slope_cv = chunk.scaled_(both.log_ratio_cv.mul_(grads[0][chunk.rows, None]))
            low_cv = slope_cv.to(head_weight_vd.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk.rows] = low_cv @ head_weight_vd
            if grad_head is not None:
                grad_head.add_(low_cv.t() @ hidden_td[chunk.rows])
        if grad_head is not None:
            grad_head = grad_head.to(head_weight_vd.dtype)
        return grad_hidden, grad_head, None, None, None


class _Both(NamedTuple):
    """Log-probs (C, V), about -1e30 outside the support, and student's less teacher's."""

    student_cv: Tensor
    teacher_cv: Tensor
    log_ratio_cv: Tensor

    def parts(self) -> Iterator[_Both]:
        """Some rows at a time, with probabilities in place of log-probs: views, which may be written to."""
        rows = max(1, _PART_ELEMENTS[self.student_cv.device.type] // self.student_cv.shape[1])
        for student_cv, teacher_cv, log_ratio_cv in zip(*(whole_cv.split(rows) for whole_cv in self), strict=True):
            student_cv.exp_()
            teacher_cv.exp_()
            # Both sum to 1, so their differences to 0; what these do sum to is the rounding of a row's constant.
            over_cv = (log_ratio_cv / 2).tanh_().mul_(student_cv + teacher_cv)
            yield _Both(student_cv, teacher_cv, log_ratio_cv.sub_(over_cv.sum(-1, keepdim=True)))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _both(chunk: Chunk, hidden_td: Tensor, head_weight_vd: Tensor, teacher: Said, how: _How) -> _Both:
    dtype = _wide(hidden_td)
    student_cv = head_logits(hidden_td[chunk.rows], head_weight_vd).to(dtype)
    teacher_cv = head_logits(teacher.hidden_te[chunk.rows], teacher.head_weight_ve).to(dtype)
    # The difference of the logits, less a constant for each row: where log-probs nearly agree, theirs is rounding.
    log_ratio_cv = chunk.scaled_(student_cv - teacher_cv)
    outside_cv = chunk.outside(how.vocabulary)
    if outside_cv is not None:
        outside_cv = outside_cv[:, : len(head_weight_vd)]
        # All of a row may be outside. Then both are uniform.
        log_ratio_cv.masked_fill_(outside_cv, 0)
    student_cv = chunk.log_softmax(student_cv, outside_cv)
    teacher_cv = chunk.log_softmax(teacher_cv, outside_cv)
    likely_c1 = teacher_cv.argmax(-1, keepdim=True)
    logits_c1, student_c1, teacher_c1 = (x.gather(1, likely_c1) for x in (log_ratio_cv, student_cv, teacher_cv))
    return _Both(student_cv, teacher_cv, log_ratio_cv.sub_(logits_c1 - (student_c1 - teacher_c1)))


def _divergence(part: _Both, how: _How) -> Tensor:
    student_cv, teacher_cv, log_ratio_cv = part
    if how.divergence == "reverse":
        return _kl(student_cv, teacher_cv, log_ratio_cv)
    if how.divergence == "forward":
        return _kl(teacher_cv, student_cv, -log_ratio_cv)
    between_cv = torch.lerp(student_cv, teacher_cv, how.beta)
    towards_student = _kl(student_cv, between_cv, _over_mixture(log_ratio_cv, how.beta))
    towards_teacher = _kl(teacher_cv, between_cv, _over_mixture(-log_ratio_cv, 1 - how.beta))
    return how.beta * towards_teacher + (1 - how.beta) * towards_student


def _to_slope(part: _Both, how: _How) -> None:
    """Make of the log-ratios d divergence / d (the student's logits / temperature)."""
    student_cv, teacher_cv, log_ratio_cv = part
    if how.divergence == "forward":
        # The student's probability less the teacher's.
        log_ratio_cv.div_(2).tanh_().mul_(student_cv + teacher_cv)
        return
    # Of a probability, up to a constant: with softmax only the difference from the mean counts.
    if how.divergence == "jsd":
        log_ratio_cv.copy_(_over_mixture(log_ratio_cv, how.beta).mul_(1 - how.beta))
    mean_c1 = (student_cv * log_ratio_cv).sum(-1, keepdim=True)
    log_ratio_cv.sub_(mean_c1).mul_(student_cv)


def _over_mixture(log_ratio_cv: Tensor, share: float) -> Tensor:
    """log(a / (share · b + (1 − share) · a)), of log(a / b)."""
    return log_ratio_cv.neg().clamp_(-_FAR, _FAR).expm1_().mul_(share).log1p_().neg_()


def _kl(a_cv: Tensor, b_cv: Tensor, log_ratio_cv: Tensor) -> Tensor:
    """(C,) KL(a ‖ b), summed from a · log(a / b) − a + b, which is never below 0.

    With y = log(a / b) / 2 and t = tanh(y), a − b is (a + b) · t, and each of these (a + b) · (y · t + (y − t)).
    """
    half_cv = log_ratio_cv / 2
    tanh_cv = half_cv.tanh()
    square_cv = half_cv.square()
    # The difference of a small y and its t is rounding, so there it is their series: as exact, where the two meet.
    near = torch.finfo(half_cv.dtype).eps ** (1 / 8)
    series_cv = (square_cv * (17 / 315)).sub_(2 / 15).mul_(square_cv).add_(1 / 3).mul_(square_cv).mul_(half_cv)
    terms_cv = torch.where(square_cv < near**2, series_cv, half_cv - tanh_cv)
    return terms_cv.addcmul_(half_cv, tanh_cv).mul_(a_cv + b_cv).sum(-1)
