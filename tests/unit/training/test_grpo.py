from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.training.config import GrpoConfig
from headrace.training.losses.grpo import grpo_loss, normaliser

LENGTHS = [3, 1, 5, 4]


def columns(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    count = sum(LENGTHS)
    logprobs = -2 + 0.6 * draw.standard_normal(count)
    behaviour = logprobs + 0.8 * draw.standard_normal(count)
    advantages = np.repeat(draw.standard_normal(len(LENGTHS)), LENGTHS)
    return tuple(torch.tensor(x, dtype=dtype) for x in (logprobs, behaviour, advantages))  # type: ignore[return-value]


def reference(config: GrpoConfig) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient and the sums, token by token in Python floats."""
    logprobs, behaviour, advantages = (x.tolist() for x in columns(torch.float64))
    loss, gradient, t = 0.0, [], 0
    sums = {"clipped": 0.0, "kl": 0.0, "outliers": 0.0}
    for length in LENGTHS:
        weight = 1 / sum(LENGTHS) if config.aggregate == "token" else 1 / (length * len(LENGTHS))
        for _ in range(length):
            ratio, advantage = math.exp(logprobs[t] - behaviour[t]), advantages[t]
            low, high = 1 - config.clip_low, 1 + config.clip_high
            free, held = ratio * advantage, min(max(ratio, low), high) * advantage
            loss -= weight * min(free, held)
            cut = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
            gradient.append(0.0 if cut else -weight * ratio * advantage)
            sums["clipped"] += cut
            sums["kl"] += ratio - 1 - math.log(ratio)
            sums["outliers"] += ratio < 0.5 or ratio > 2
            t += 1
    return loss, gradient, sums


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_gradient_and_sums_equal_a_reference_written_token_by_token(
    aggregate: str, dtype: torch.dtype, tolerance: float
) -> None:
    config = GrpoConfig(clip_low=0.2, clip_high=0.3, aggregate=aggregate)  # type: ignore[arg-type]
    expected_loss, expected_gradient, expected_sums = reference(config)
    assert 0 < expected_sums["clipped"] < sum(LENGTHS)
    assert 0 < expected_sums["outliers"] < sum(LENGTHS)
    logprobs, behaviour, advantages = columns(dtype)
    logprobs.requires_grad_()
    divisor = normaliser(sum(LENGTHS), len(LENGTHS), config)
    loss, sums = grpo_loss(logprobs, behaviour, advantages, torch.tensor(LENGTHS), config, divisor)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss, rel=tolerance)
    np.testing.assert_allclose(logprobs.grad, expected_gradient, rtol=tolerance, atol=tolerance)  # type: ignore[arg-type]
    for name, value in expected_sums.items():
        assert getattr(sums, name).item() == pytest.approx(value, rel=max(tolerance, 1e-9)), name


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_micro_batches_add_up_to_the_whole_batch(aggregate: str) -> None:
    config = GrpoConfig(aggregate=aggregate)  # type: ignore[arg-type]
    logprobs, behaviour, advantages = columns(torch.float64)
    logprobs.requires_grad_()
    divisor = normaliser(sum(LENGTHS), len(LENGTHS), config)
    whole, _ = grpo_loss(logprobs, behaviour, advantages, torch.tensor(LENGTHS), config, divisor)
    (gradient,) = torch.autograd.grad(whole, logprobs)
    cut = sum(LENGTHS[:2])
    parts = [
        grpo_loss(logprobs[s], behaviour[s], advantages[s], torch.tensor(lengths), config, divisor)[0]
        for s, lengths in ((slice(0, cut), LENGTHS[:2]), (slice(cut, None), LENGTHS[2:]))
    ]
    (summed,) = torch.autograd.grad(sum(parts), logprobs)  # type: ignore[arg-type]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-12)
    np.testing.assert_allclose(summed, gradient, rtol=1e-12)


def test_an_absurd_log_ratio_gives_a_finite_loss() -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    advantages = torch.tensor([-1.0, 1.0])
    behaviour = torch.tensor([-500.0, 0.0])
    loss, sums = grpo_loss(logprobs, behaviour, advantages, torch.tensor([2]), GrpoConfig(), 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20) / 2, rel=1e-5)
    assert logprobs.grad.tolist() == [0.0, 0.0]  # type: ignore[union-attr]
    assert sums.outliers.item() == 2
