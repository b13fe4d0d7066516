"""Group-relative policy optimisation: the clipped surrogate against the recorded log-probs.

Shape letters: t trained tokens of a micro-batch, sequence after sequence; s its sequences.

A micro-batch's loss is its share of the whole batch's: with the batch's own `normaliser`, the shares (and their
gradients) add up to the loss of the batch in one piece, however it was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.training.config import GrpoConfig

OUTLIER_RATIOS = (0.5, 2.0)
# exp() of a larger difference says nothing more, and overflows float32 soon after; beyond it no gradient flows.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class GrpoSums:
    """Sums over the micro-batch's tokens, as 0-dimensional float64 tensors without a gradient."""

    clipped: torch.Tensor
    """Tokens whose gradient the clip cuts off."""
    kl: torch.Tensor
    """The k3 estimate of KL(behaviour ‖ trainer): ratio − 1 − log ratio."""
    outliers: torch.Tensor
    """Tokens whose ratio lies outside [0.5, 2]."""
    kl_t: torch.Tensor
    """The k3 estimate token by token."""


def normaliser(trained_tokens: int, trained_sequences: int, config: GrpoConfig) -> float:
    """What the whole batch's loss is divided by."""
    return float(trained_tokens if config.aggregate == "token" else trained_sequences)


def grpo_loss(
    logprobs_t: torch.Tensor,
    behaviour_t: torch.Tensor,
    advantages_t: torch.Tensor,
    trained_s: torch.Tensor,
    config: GrpoConfig,
    normaliser: float,
) -> tuple[torch.Tensor, GrpoSums]:
    """The micro-batch's share of the batch's loss, and what its metrics are made of.

    `trained_s` counts each sequence's trained tokens, all at least 1. Only `logprobs_t` carries a gradient.
    """
    log_ratio_t = (logprobs_t - behaviour_t).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_t = log_ratio_t.exp()
    clipped_t = ratio_t.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_t = torch.minimum(ratio_t * advantages_t, clipped_t * advantages_t)
    if config.aggregate == "sequence":
        objective_t = objective_t / trained_s.repeat_interleave(trained_s, output_size=len(objective_t))
    loss = -objective_t.sum() / normaliser
    with torch.no_grad():
        sums = _sums(log_ratio_t.detach().double(), advantages_t, config)
    return loss, sums


def _sums(log_ratio_t: torch.Tensor, advantages_t: torch.Tensor, config: GrpoConfig) -> GrpoSums:
    ratio_t = log_ratio_t.exp()
    # expm1: near a ratio of 1 the two terms cancel to second order.
    kl_t = torch.expm1(log_ratio_t) - log_ratio_t
    too_high_t = (ratio_t > 1 + config.clip_high) & (advantages_t > 0)
    too_low_t = (ratio_t < 1 - config.clip_low) & (advantages_t < 0)
    low, high = OUTLIER_RATIOS
    return GrpoSums(
        clipped=(too_high_t | too_low_t).sum(dtype=torch.float64),
        kl=kl_t.sum(),
        outliers=((ratio_t < low) | (ratio_t > high)).sum(dtype=torch.float64),
        kl_t=kl_t,
    )
