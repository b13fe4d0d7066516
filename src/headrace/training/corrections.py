"""Corrections for tokens that an older policy sampled, as weights of tokens. Formulas: docs/off-policy.md.

    columns ─▶ proximal log-probs ─▶ ratios at a level ─▶ weights, multiplied ─▶ the surrogate (losses/policy.py)

Everything here is without a gradient but `penalty`. Shape letter: t trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.training.correction_config import (
    OF_PROXIMAL,
    WEIGHING,
    CispoConfig,
    Correction,
    DecoupledConfig,
    KimiConfig,
    Level,
    MisConfig,
    OpsmConfig,
    RejectionConfig,
    TisConfig,
    ToprConfig,
    VersionDropConfig,
)
from headrace.training.losses.columns import Columns, Units, exp_clamped


class Corrected(NamedTuple):
    weights_t: Tensor
    anchor_t: Tensor
    """The log-probs that the surrogate's ratio is against."""


def correct(columns: Columns, corrections: Sequence[Correction]) -> Corrected:
    """All of them together; none gives weights of 1 and the recorded log-probs as anchor."""
    with torch.no_grad():
        proximal_t = _proximal(columns, corrections)
        weights = [_weight(columns, proximal_t, one) for one in corrections if not isinstance(one, KimiConfig)]
        weights_t = reduce(torch.mul, weights, torch.ones_like(columns.behaviour_t))
    if any(isinstance(one, CispoConfig) for one in corrections):
        return Corrected(weights_t, columns.now_t)
    weighed = any(isinstance(one, WEIGHING) for one in corrections)
    return Corrected(weights_t, proximal_t if weighed else columns.behaviour_t)


def penalty(columns: Columns, corrections: Sequence[Correction]) -> Tensor | None:
    """What is added to each token's loss, with its gradient; None where nothing is."""
    tau = sum(one.tau for one in corrections if isinstance(one, KimiConfig))
    return None if tau == 0 else tau / 2 * (columns.logprobs_t - columns.behaviour_t).square()


def adds_gradient(corrections: Sequence[Correction]) -> bool:
    """Whether tokens without an advantage have a gradient too."""
    return any(isinstance(one, KimiConfig) for one in corrections)


def wants_proximal(corrections: Sequence[Correction]) -> bool:
    """Whether a batch's second update needs the log-probs from before its first."""
    return any(isinstance(one, OF_PROXIMAL) for one in corrections)


def _interpolates(corrections: Sequence[Correction]) -> bool:
    return any(isinstance(one, DecoupledConfig) and one.proximal == "interpolated" for one in corrections)


def _proximal(columns: Columns, corrections: Sequence[Correction]) -> Tensor:
    behaviour_t = columns.behaviour_t
    before_t = columns.now_t if columns.proximal_t is None else columns.proximal_t
    if not _interpolates(corrections):
        return before_t
    lags_t = columns.lags_t.clamp(min=1)
    return behaviour_t + (1 - 1 / lags_t.to(before_t.dtype)) * (before_t - behaviour_t)


def _weight(columns: Columns, proximal_t: Tensor, correction: Correction) -> Tensor:
    log_ratio_t = proximal_t - columns.behaviour_t

    def ratio(level: Level, geometric: bool = False) -> Tensor:
        return exp_clamped(_at(columns, log_ratio_t, level, geometric))

    match correction:
        case TisConfig(level=level, geometric=geometric, cap=cap):
            return ratio(level, geometric).clamp(max=cap)
        case DecoupledConfig(cap=cap):
            return ratio("token").clamp(max=cap)
        case CispoConfig(low=low, high=high):
            return exp_clamped(columns.now_t - columns.behaviour_t).clamp(1 - low, 1 + high)
        case MisConfig(level=level, geometric=geometric, low=low, high=high):
            at_level_t = ratio(level, geometric)
            return at_level_t * _within(at_level_t, low, high)
        case ToprConfig(level=level, geometric=geometric):
            at_level_t = ratio(level, geometric)
            return torch.where(columns.advantages_t < 0, at_level_t.clamp(max=1.0), 1.0)
        case RejectionConfig(level=level, low=low, high=high):
            return _within(ratio(level, geometric=True), low, high)
        case OpsmConfig(delta=delta):
            away_t = columns.sequences.mean(columns.behaviour_t - columns.now_t)
            return ~((columns.advantages_t < 0) & (away_t > delta)) * torch.ones_like(away_t)
        case VersionDropConfig(level=level, max_lag=max_lag):
            lags_t = columns.lags_t.to(log_ratio_t.dtype)
            units = _units(columns, level)
            return ((lags_t if units is None else units.most(lags_t)) <= max_lag).to(log_ratio_t.dtype)
        case _:
            raise AssertionError(correction)


def _within(ratio_t: Tensor, low: float, high: float) -> Tensor:
    return ((ratio_t >= low) & (ratio_t <= high)).to(ratio_t.dtype)


def _at(columns: Columns, log_ratio_t: Tensor, level: Level, geometric: bool) -> Tensor:
    units = _units(columns, level)
    if units is None:
        return log_ratio_t
    return units.mean(log_ratio_t) if geometric else units.sum(log_ratio_t)


def _units(columns: Columns, level: Level) -> Units | None:
    """None: tokens."""
    return {"token": None, "turn": columns.turns, "sequence": columns.sequences}[level]
