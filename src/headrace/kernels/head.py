"""From logits to log-probs of given tokens and entropies, and back, each in one pass over the logits.

    logits (T, V) ─▶ log-prob of a target, entropy, log of the sum of exponentials
    gradients of the first two ─▶ gradient of the logits, rounded once

The reference is `models.logprobs.token_logprobs`, for rows without a support. Shape letters: T rows, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels import launch

BLOCK = 4096
"""Columns that a program reads at a time."""
LOWEST: tl.constexpr = tl.constexpr(-1e30)
"""Below every logit."""


def target_logprobs(logits_tv: Tensor, targets_t: Tensor, temperature_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, logs of sums), each (T,) float32, of softmax(logits / temperature)."""
    rows, width = logits_tv.shape
    logprobs, entropy, total = (torch.empty(rows, dtype=torch.float32, device=logits_tv.device) for _ in range(3))
    block = min(BLOCK, launch.power_of_two(width))
    _forward[(rows,)](
        logits_tv, targets_t, temperature_t, logprobs, entropy, total, width, logits_tv.stride(0),
        BLOCK=block, num_warps=8,
    )  # fmt: skip
    return logprobs, entropy, total


@triton.jit
def _forward(logits, targets, temperature, logprobs, entropy, total, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0 / tl.load(temperature + row)
    columns = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    moments = tl.zeros((BLOCK,), tl.float32)
    # Each lane keeps its own maximum: nothing is reduced before the end.
    for start in range(0, width, BLOCK):
        real = start + columns < width
        value = tl.load(logits + row * stride + start + columns, mask=real, other=0.0).to(tl.float32) * scale
        higher = tl.maximum(most, tl.where(real, value, LOWEST))
        before = tl.exp(most - higher)
        now = tl.where(real, tl.exp(value - higher), 0.0)
        sums = sums * before + now
        moments = moments * before + now * value
        most = higher
    top = tl.max(most, axis=0)
    weight = tl.exp(most - top)
    whole = tl.sum(sums * weight, axis=0)
    log_total = top + tl.log(whole)
    target = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logprobs + row, target - log_total)
    tl.store(entropy + row, log_total - tl.sum(moments * weight, axis=0) / whole)
    tl.store(total + row, log_total)


def logits_gradient(
    logits_tv: Tensor,
    targets_t: Tensor,
    temperature_t: Tensor,
    entropy_t: Tensor,
    total_t: Tensor,
    grad_logprobs_t: Tensor,
    grad_entropy_t: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """(T, V) in `dtype`."""
    rows, width = logits_tv.shape
    out = torch.empty(rows, width, dtype=dtype, device=logits_tv.device)
    block = min(BLOCK, launch.power_of_two(width))
    _backward[(rows, launch.blocks(width, block))](
        logits_tv, targets_t, temperature_t, entropy_t, total_t, grad_logprobs_t, grad_entropy_t, out,
        width, logits_tv.stride(0), BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _backward(
    logits, targets, temperature, entropy, total, grad_logprobs, grad_entropy, out, width, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    scale = 1.0 / tl.load(temperature + row)
    value = tl.load(logits + row * stride + columns, mask=real, other=0.0).to(tl.float32) * scale
    logp = value - tl.load(total + row)
    of_logprob, of_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropy + row)
    # d log p(target) / d logit = [target] - p;  d entropy / d logit = -p (log p + entropy)
    found = -tl.exp(logp) * (of_logprob + of_entropy * (logp + tl.load(entropy + row)))
    found += tl.where(columns == tl.load(targets + row), of_logprob, 0.0)
    tl.store(out + row * width + columns, (found * scale).to(out.dtype.element_ty), mask=real)
