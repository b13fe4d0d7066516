"""Estimates, token by token, of how far a policy is from a reference. Formulas: docs/off-policy.md."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.training.config import KlEstimator
from headrace.training.losses.columns import MAX_LOG_RATIO


def kl_estimate(log_ratio_t: Tensor, estimator: KlEstimator) -> Tensor:
    """Of log p − log q for tokens drawn from p: in expectation, or to second order, KL(p ‖ q)."""
    if estimator == "k1":
        return log_ratio_t
    if estimator == "k2":
        return log_ratio_t.square() / 2
    log_ratio_t = log_ratio_t.clamp(min=-MAX_LOG_RATIO)
    # expm1: near a ratio of 1 the terms cancel to second order.
    return torch.expm1(-log_ratio_t) + log_ratio_t
