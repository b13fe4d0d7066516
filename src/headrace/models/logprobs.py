"""Log-probability of given tokens and the entropy they were drawn from, without ever holding all logits.

Shape letters: T tokens, D hidden size, V vocabulary, C rows of one chunk, K support ids of all rows together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# A chunk's float32 logits: 512 MiB, some 900 rows of a 150 000-token vocabulary.
CHUNK_ELEMENTS = 2**27
# Finite, so that 0 × log 0 is 0 and no NaN arises; its exponential is exactly 0.
OUTSIDE_SUPPORT = -1e30


Linear = Callable[[Tensor, Tensor], Tensor]
"""(rows (C, D), head (V, D)) to logits (C, V)."""
Score = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits (C, V), -inf outside the support; temperatures (C,); targets (C,)) to log-probs (C,)."""


def head_logits(hidden_td: Tensor, head_weight_vd: Tensor) -> Tensor:
    """(T, V) logits. On CUDA in float32 also for half precision: rounding a logit of 20 to bfloat16 would move its
    log-prob by up to 0.06, and not by the same in sampling and in training."""
    if hidden_td.is_cuda and hidden_td.dtype.itemsize < 4:
        return torch.mm(hidden_td, head_weight_vd.t(), out_dtype=torch.float32)
    return F.linear(hidden_td, head_weight_vd)


class Support(NamedTuple):
    """The ids each row could have sampled: row t's are `ids[offsets[t]:offsets[t+1]]`; none means all."""

    ids: Tensor
    """Integers (K,)."""
    offsets: Tensor
    """Integers (T+1,), from 0 to K, non-decreasing."""


def token_logprobs(
    hidden_td: Tensor,
    head_weight_vd: Tensor,
    targets_t: Tensor,
    temperature: Tensor | float = 1.0,
    support: Support | tuple[Tensor, Tensor] | None = None,
    *,
    chunk_rows: int | None = None,
    linear: Linear | None = None,
    score: Score | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob (T,) of each target and entropy (T,) of softmax(logits / temperature) over each row's support.

    The product with the head is `head_logits`, as it is when sampling; the rest is float32.
    Differentiable once in the hidden states and the head, not in the temperature. At most `chunk_rows` rows
    of logits exist at a time; with several chunks the backward pass computes each chunk's logits again.
    A target outside its row's support has a log-prob near -1e30 (probability 0) and no gradient.

    A back end that wants other bits gives the product with the head as `linear`, and as `score` what the
    log-probs are computed by; `score` wants a temperature per row.
    """
    if not isinstance(temperature, Tensor) and temperature <= 0:
        raise ValueError(f"temperature must be positive to define a distribution, got {temperature}")
    rows = chunk_rows or max(1, CHUNK_ELEMENTS // head_weight_vd.shape[0])
    ids, offsets = support if support is not None else (None, None)
    logprobs, entropy = _TokenLogprobs.apply(
        hidden_td, head_weight_vd, targets_t, temperature, ids, offsets, rows, linear, score
    )
    return logprobs, entropy


class Chunk(NamedTuple):
    rows: slice
    targets_c1: Tensor
    temperature: Tensor | float
    support: Support | None

    def logits(self, hidden_td: Tensor, head_weight_vd: Tensor, linear: Linear | None) -> Tensor:
        """(C, V)."""
        return (linear or head_logits)(hidden_td[self.rows], head_weight_vd)

    def scaled_(self, numbers_cv: Tensor) -> Tensor:
        """Divided by the temperature, in place."""
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            numbers_cv.div_(self.temperature)
        return numbers_cv

    def outside(self, vocabulary: int) -> Tensor | None:
        """(C, V): which ids are not of the support. None: all are."""
        if self.support is None:
            return None
        ids, offsets = self.support
        counts = offsets.diff()
        outside_cv = (counts > 0)[:, None].expand(-1, vocabulary).contiguous()
        rows = torch.arange(len(counts), device=counts.device)
        row_of_id = torch.repeat_interleave(rows, counts, output_size=ids.numel())
        outside_cv[row_of_id, ids.long()] = False
        return outside_cv

    def log_softmax(self, logits_cv: Tensor, outside_cv: Tensor | None) -> Tensor:
        """(C, V) in the logits' dtype; entries outside the support hold about -1e30. Uses up the logits."""
        self.scaled_(logits_cv)
        if outside_cv is not None:
            logits_cv.masked_fill_(outside_cv, OUTSIDE_SUPPORT)
        return torch.log_softmax(logits_cv, dim=-1)

    def score(self, logits_cv: Tensor, score: Score) -> Tensor:
        """(C,) log-probs of the targets."""
        outside_cv = self.outside(logits_cv.shape[1])
        if outside_cv is not None:
            logits_cv = logits_cv.masked_fill(outside_cv, -torch.inf)
        assert isinstance(self.temperature, Tensor)
        logprobs_c = score(logits_cv, self.temperature[:, 0], self.targets_c1[:, 0])
        return logprobs_c.clamp_(min=OUTSIDE_SUPPORT)


def chunks_of(
    targets_t: Tensor, temperature: Tensor | float, ids: Tensor | None, offsets: Tensor | None, rows: int
) -> list[Chunk]:
    total = targets_t.shape[0]
    starts = range(0, total, rows)
    supports: list[Support | None] = [None] * len(starts)
    if ids is not None and offsets is not None:
        if len(starts) == 1:  # no bounds to read back from the device
            supports = [Support(ids, offsets)]
        else:
            bounds = [*offsets[:-1:rows].tolist(), ids.numel()]
            supports = [
                Support(ids[first:last], offsets[start : start + rows + 1] - first)
                for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True)
            ]
    return [
        Chunk(
            rows=slice(start, start + rows),
            targets_c1=targets_t[start : start + rows, None],
            temperature=temperature[start : start + rows, None] if isinstance(temperature, Tensor) else temperature,
            support=support,
        )
        for start, support in zip(starts, supports, strict=True)
    ]


class _TokenLogprobs(torch.autograd.Function):
    """One function rather than a checkpoint per chunk: the head's gradient is summed in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_td: Tensor,
        head_weight_vd: Tensor,
        targets_t: Tensor,
        temperature: Tensor | float,
        ids: Tensor | None,
        offsets: Tensor | None,
        rows: int,
        linear: Linear | None,
        score: Score | None,
    ) -> tuple[Tensor, Tensor]:
        chunks = chunks_of(targets_t.long(), temperature, ids, offsets, rows)
        logprobs_t = hidden_td.new_empty(targets_t.shape, dtype=torch.float32)
        entropy_t = torch.empty_like(logprobs_t)
        kept_cv: Tensor | None = None
        for chunk in chunks:
            logits_cv = chunk.logits(hidden_td, head_weight_vd, linear)
            if score is not None:
                logprobs_t[chunk.rows] = chunk.score(logits_cv, score)
            logp_cv = chunk.log_softmax(logits_cv.float(), chunk.outside(logits_cv.shape[1]))
            if score is None:
                logprobs_t[chunk.rows] = logp_cv.gather(1, chunk.targets_c1).squeeze(1)
            entropy_t[chunk.rows] = -torch.linalg.vecdot(logp_cv.exp(), logp_cv)
            if len(chunks) == 1:
                kept_cv = logp_cv
        ctx.save_for_backward(hidden_td, head_weight_vd, logprobs_t, entropy_t, kept_cv)
        ctx.chunks, ctx.linear = chunks, linear
        ctx.set_materialize_grads(False)
        return logprobs_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_td, head_weight_vd, logprobs_t, entropy_t, kept_cv = ctx.saved_tensors
        grad_logprobs_t, grad_entropy_t = grads
        if grad_logprobs_t is not None:
            grad_logprobs_t = grad_logprobs_t * (logprobs_t > OUTSIDE_SUPPORT / 2)
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden_td) if wants_hidden else None
        # Many chunks summed in half precision would lose the small ones.
        grad_head = torch.zeros_like(head_weight_vd, dtype=torch.float32) if wants_head else None
        for chunk in ctx.chunks:
            logp_cv = kept_cv
            if logp_cv is None:
                logits_cv = chunk.logits(hidden_td, head_weight_vd, ctx.linear)
                logp_cv = chunk.log_softmax(logits_cv.float(), chunk.outside(logits_cv.shape[1]))
            grad_logits_cv = logp_cv.exp()
            if grad_entropy_t is None:
                grad_logits_cv.mul_(-grad_logprobs_t[chunk.rows, None])
            else:
                # d entropy / d logit = -p (log p + entropy)
                slope_cv = (logp_cv + entropy_t[chunk.rows, None]).mul_(grad_entropy_t[chunk.rows, None])
                if grad_logprobs_t is not None:
                    slope_cv.add_(grad_logprobs_t[chunk.rows, None])
                grad_logits_cv.mul_(slope_cv.neg_())
            if grad_logprobs_t is not None:
                grad_logits_cv.scatter_add_(1, chunk.targets_c1, grad_logprobs_t[chunk.rows, None])
            low_cv = chunk.scaled_(grad_logits_cv).to(head_weight_vd.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk.rows] = low_cv @ head_weight_vd
            if grad_head is not None:
                if grad_head.dtype == low_cv.dtype:
                    grad_head.addmm_(low_cv.t(), hidden_td[chunk.rows])
                else:
                    grad_head.add_(low_cv.t() @ hidden_td[chunk.rows])
        if grad_head is not None:
            grad_head = grad_head.to(head_weight_vd.dtype)
        return grad_hidden, grad_head, None, None, None, None, None, None, None
