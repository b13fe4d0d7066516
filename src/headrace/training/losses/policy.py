"""The policy's loss: a surrogate of ratios and advantages, weighted by corrections. Formulas: docs/off-policy.md.

A micro-batch's loss is its share of the whole batch's: with the batch's own `normaliser`, the shares (and their
gradients) add up to the loss of the batch in one piece, however it was cut. Shape letter: t trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.training.algorithms import Recipe
from headrace.training.config import ReferenceConfig
from headrace.training.correction_config import Correction
from headrace.training.corrections import correct, penalty
from headrace.training.losses.columns import MAX_LOG_RATIO, Columns, exp_clamped
from headrace.training.losses.kl import kl_estimate

OUTLIER_RATIOS = (0.5, 2.0)


@dataclass(frozen=True)
class Sums:
    """Sums over the micro-batch's tokens, as 0-dimensional float64 tensors, and one column; without a gradient."""

    clipped: Tensor
    """Tokens whose gradient the clip cuts off."""
    kl: Tensor
    """The k3 estimate of KL(behaviour ‖ trainer): ratio − 1 − log ratio."""
    outliers: Tensor
    """Tokens whose ratio to the policy that sampled them lies outside [0.5, 2]."""
    ratios: Tensor
    """Of those ratios."""
    squared_ratios: Tensor
    weights: Tensor
    """Of the corrections' weights."""
    squared_weights: Tensor
    dropped: Tensor
    """Tokens of weight 0."""
    kl_t: Tensor
    """The k3 estimate token by token."""
    reference_kl: Tensor
    """The reference's estimate, if there is one."""
    divergence: Tensor
    """From the teacher, if there is one."""


def normaliser(trained_tokens: int, trained_sequences: int, recipe: Recipe) -> float:
    """What the whole batch's loss is divided by; of one without tokens not 0."""
    sequences = max(1, trained_sequences) * (recipe.length if recipe.aggregate == "constant" else 1)
    return float(max(1, trained_tokens) if recipe.aggregate == "token" else sequences)


def policy_loss(
    columns: Columns,
    recipe: Recipe,
    corrections: Sequence[Correction],
    normaliser: float,
    entropy_bonus: float = 0.0,
    reference: ReferenceConfig | None = None,
    distillation: float = 0.0,
) -> tuple[Tensor, Sums]:
    """The micro-batch's share of the batch's loss, and what its metrics are made of."""
    weights_t, anchor_t = correct(columns, corrections)
    ratio_t = _ratio(columns, anchor_t, recipe)
    loss_t = -weights_t * _objective(ratio_t, columns.advantages_t, recipe)
    more_t = penalty(columns, corrections)
    if more_t is not None:
        loss_t = loss_t + more_t
    if reference is not None and reference.into == "loss":
        loss_t = loss_t + reference.coefficient * _from_reference(columns, columns.logprobs_t, reference)
    if columns.divergence_t is not None:
        loss_t = loss_t + distillation * columns.divergence_t
    if entropy_bonus:
        loss_t = loss_t - entropy_bonus * columns.entropy_t
    if recipe.aggregate == "sequence":
        loss_t = loss_t / columns.sequences.spread(columns.sequences.sizes)
    with torch.no_grad():
        sums = _sums(columns, ratio_t.detach(), weights_t, recipe, reference)
    return loss_t.sum() / normaliser, sums


def _ratio(columns: Columns, anchor_t: Tensor, recipe: Recipe) -> Tensor:
    log_ratio_t = columns.logprobs_t - anchor_t
    return exp_clamped(columns.sequences.mean(log_ratio_t) if recipe.ratio == "sequence" else log_ratio_t)


def _objective(ratio_t: Tensor, advantages_t: Tensor, recipe: Recipe) -> Tensor:
    free_t = ratio_t * advantages_t
    if recipe.clip is None:
        return free_t
    low, high = recipe.clip
    objective_t = torch.minimum(free_t, ratio_t.clamp(1 - low, 1 + high) * advantages_t)
    if recipe.dual_clip is not None:
        held_t = torch.maximum(objective_t, recipe.dual_clip * advantages_t)
        objective_t = torch.where(advantages_t < 0, held_t, objective_t)
    return objective_t


def _from_reference(columns: Columns, logprobs_t: Tensor, reference: ReferenceConfig) -> Tensor:
    assert columns.reference_t is not None
    return kl_estimate(logprobs_t - columns.reference_t, reference.estimator)


def _sums(
    columns: Columns, ratio_t: Tensor, weights_t: Tensor, recipe: Recipe, reference: ReferenceConfig | None
) -> Sums:
    log_ratio_t = (columns.now_t - columns.behaviour_t).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    to_behaviour_t = log_ratio_t.exp()
    # expm1: near a ratio of 1 the two terms cancel to second order.
    kl_t = torch.expm1(log_ratio_t) - log_ratio_t
    away_t = kl_t.new_zeros(1) if reference is None else _from_reference(columns, columns.now_t.double(), reference)
    low, high = OUTLIER_RATIOS
    weights_t = weights_t.double()
    return Sums(
        clipped=_clipped(ratio_t, columns.advantages_t, recipe).sum(dtype=torch.float64),
        kl=kl_t.sum(),
        outliers=((to_behaviour_t < low) | (to_behaviour_t > high)).sum(dtype=torch.float64),
        ratios=to_behaviour_t.sum(),
        squared_ratios=to_behaviour_t.square().sum(),
        weights=weights_t.sum(),
        squared_weights=weights_t.square().sum(),
        dropped=(weights_t == 0).sum(dtype=torch.float64),
        kl_t=kl_t,
        reference_kl=away_t.sum(),
        divergence=away_t.new_zeros(()) if columns.divergence_t is None else columns.divergence_t.double().sum(),
    )


def _clipped(ratio_t: Tensor, advantages_t: Tensor, recipe: Recipe) -> Tensor:
    if recipe.clip is None:
        return torch.zeros_like(ratio_t)
    low, high = recipe.clip
    cut_t = ((ratio_t > 1 + high) & (advantages_t > 0)) | ((ratio_t < 1 - low) & (advantages_t < 0))
    if recipe.dual_clip is not None:
        cut_t |= (ratio_t > recipe.dual_clip) & (advantages_t < 0)
    return cut_t
