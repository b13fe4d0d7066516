from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.training.config import OptimizerConfig
from headrace.training.optimizer import Optimizer, learning_rate


def test_the_rate_rises_linearly_and_then_stays() -> None:
    config = OptimizerConfig(learning_rate=0.8, warmup_steps=4)
    assert [learning_rate(step, config, 100) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_the_linear_schedule_falls_to_its_final_fraction() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear", final_fraction=0.2)
    rates = [learning_rate(step, config, 10) for step in range(12)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[6] == pytest.approx(0.6)
    assert rates[10:] == pytest.approx([0.2, 0.2])


def test_the_cosine_schedule_is_half_a_wave() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="cosine")
    for step in (0, 3, 5, 10):
        assert learning_rate(step, config, 10) == pytest.approx((1 + math.cos(math.pi * step / 10)) / 2)


def test_updates_equal_adamw_computed_by_hand() -> None:
    config = OptimizerConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
    draw = np.random.default_rng(0)
    start = draw.standard_normal((2, 3))
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = Optimizer({"w": parameter}, config)
    weight, first, second = start.copy(), np.zeros((2, 3)), np.zeros((2, 3))
    for step in range(1, 4):
        gradient = 3 * draw.standard_normal((2, 3))
        parameter.grad.add_(torch.tensor(gradient, dtype=torch.float32))  # type: ignore[union-attr]
        norm = optimizer.clip()
        assert norm.item() == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        optimizer.step(0.01)
        gradient /= max(1.0, np.linalg.norm(gradient))
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        weight *= 1 - 0.01 * 0.1
        weight -= 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
    np.testing.assert_allclose(parameter.detach(), weight, rtol=1e-5)
    assert parameter.grad is not None
    assert not parameter.grad.any()


def test_a_step_without_a_gradient_still_follows_the_momentum() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer({"w": parameter}, OptimizerConfig())
    parameter.grad.fill_(1.0)  # type: ignore[union-attr]
    optimizer.step(0.1)
    after_one = parameter.item()
    optimizer.step(0.1)
    assert parameter.item() < after_one < 0


def test_state_moved_to_a_fresh_optimizer_goes_on_bitwise_the_same() -> None:
    gradients = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))

    def run(parameter: torch.nn.Parameter, optimizer: Optimizer, rows: range) -> None:
        for i in rows:
            parameter.grad.copy_(gradients[i])  # type: ignore[union-attr]
            optimizer.step(0.01)

    whole = torch.nn.Parameter(torch.ones(5))
    unbroken = Optimizer({"w": whole}, OptimizerConfig())
    run(whole, unbroken, range(2))
    saved = {name: tensor.clone() for name, tensor in unbroken.tensors().items()}
    resumed = torch.nn.Parameter(whole.detach().clone())
    run(whole, unbroken, range(2, 4))
    other = Optimizer({"w": resumed}, OptimizerConfig())
    other.load_tensors(saved)
    run(resumed, other, range(2, 4))
    assert torch.equal(whole, resumed)
    assert sorted(saved) == ["exp_avg/w", "exp_avg_sq/w", "step/w"]


def test_a_parameter_that_wants_no_gradient_is_left_alone() -> None:
    moved, fixed = (torch.nn.Parameter(torch.ones(3), requires_grad=wants) for wants in (True, False))
    optimizer = Optimizer({"moved": moved, "fixed": fixed}, OptimizerConfig(weight_decay=0.5))
    moved.grad = torch.ones(3)
    optimizer.step(0.1)
    assert moved.max() < 1
    assert fixed.tolist() == [1.0, 1.0, 1.0]
    assert {name.split("/")[-1] for name in optimizer.tensors()} == {"moved"}
