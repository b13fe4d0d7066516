from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from headrace.training.config import OptimizerConfig
from headrace.training.optimizer import Optimizer, _Kernel, _Torch, learning_rate, undecayed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
        norm = optimizer.norm()
        assert norm.item() == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        optimizer.step(0.01)
        gradient /= max(1.0, np.linalg.norm(gradient))
        first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
        weight *= 1 - 0.01 * 0.1
        weight -= 0.01 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
    np.testing.assert_allclose(parameter.detach(), weight, rtol=1e-5)
    assert parameter.grad is not None
    assert not parameter.grad.any()


@pytest.mark.parametrize("way", [_Torch, _Kernel])
def test_updates_in_groups_are_those_of_torch_with_groups(way: type[_Torch] | type[_Kernel]) -> None:
    config = OptimizerConfig(weight_decay=0.5, max_grad_norm=0.7)
    values = drawn(0)
    ours = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = Optimizer(ours, config, undecayed={"vector", "number"})
    optimizer._adamw = way(list(ours.values()), config, [True, False, False])
    expected = torch.optim.AdamW(
        [
            {"params": [theirs["matrix"]], "weight_decay": 0.5},
            {"params": [theirs["vector"], theirs["number"]], "weight_decay": 0.0},
        ],
        betas=config.betas,
        eps=config.eps,
    )
    for step in range(1, 5):
        for name, gradient in drawn(step).items():
            ours[name].grad.copy_(gradient)  # type: ignore[union-attr]
            theirs[name].grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7)
        for group in expected.param_groups:
            group["lr"] = 0.01
        expected.step()
        optimizer.step(0.01)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=2e-6, atol=2e-8, msg=name)


def test_without_gradients_only_what_decays_shrinks() -> None:
    parameters = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("decays", "stays")}
    optimizer = Optimizer(parameters, OptimizerConfig(weight_decay=0.5), undecayed={"stays"})
    optimizer.step(0.1)
    assert parameters["decays"].unique().tolist() == pytest.approx([0.95])
    assert parameters["stays"].unique().tolist() == [1.0]


def test_a_state_of_before_goes_on_where_some_no_longer_decay() -> None:
    """It is kept by name, in no order of groups."""
    parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")}
    before = Optimizer(parameters, OptimizerConfig(weight_decay=0.5))
    for index, parameter in enumerate(parameters.values()):
        parameter.grad.fill_(0.1 + index / 10)  # type: ignore[union-attr]
    before.step(0.1)
    saved = {name: tensor.clone() for name, tensor in before.tensors().items()}
    after = Optimizer(parameters, OptimizerConfig(weight_decay=0.5), undecayed={"b"})
    after.load_tensors(saved)
    assert {name: tensor.tolist() for name, tensor in after.tensors().items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }


MIXED = {
    "model.embed_tokens.weight": (8, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.self_attn.q_norm.weight": (2,),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.q_proj.bias": (4,),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (2, 4),
    "model.layers.0.mlp.experts.gate_up_proj": (2, 4, 4),
    "lm_head.weight": (8, 4),
}


@pytest.mark.parametrize(
    ("spared", "expected"),
    [
        ((), set()),
        (("norms",), {"model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight"}),
        (
            ("biases",),
            {"model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.experts.gate_up_proj_bias"},
        ),
        (("embeddings",), {"model.embed_tokens.weight"}),
    ],
)
def test_each_kind_of_parameter_can_be_spared_by_itself(spared: tuple[Any, ...], expected: set[str]) -> None:
    parameters = {name: torch.zeros(shape) for name, shape in MIXED.items()}
    assert undecayed(parameters, {"model.embed_tokens.weight"}, spared) == expected


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


def test_the_gradient_is_clipped_by_its_norm_whether_it_was_asked_for_or_not() -> None:
    moments = []
    for asked in (True, False):
        parameter = torch.nn.Parameter(torch.zeros(2))
        optimizer = Optimizer({"w": parameter}, OptimizerConfig(max_grad_norm=0.5))
        parameter.grad.copy_(torch.tensor([3.0, 4.0]))  # type: ignore[union-attr]
        if asked:
            assert optimizer.norm().item() == 5.0
            assert parameter.grad.tolist() == [3.0, 4.0]  # type: ignore[union-attr]
        optimizer.step(0.1)
        moments.append(optimizer.tensors()["exp_avg/w"].tolist())
    assert moments[0] == moments[1] == pytest.approx([0.03, 0.04], rel=1e-5)


def test_a_norm_from_before_gradients_were_zeroed_clips_nothing_later() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"w": parameter}, OptimizerConfig())
    parameter.grad.fill_(float("nan"))  # type: ignore[union-attr]
    assert optimizer.norm().isnan()
    optimizer.zero_grad()
    parameter.grad.copy_(torch.tensor([0.3, 0.4]))  # type: ignore[union-attr]
    optimizer.step(0.1)
    assert optimizer.tensors()["exp_avg/w"].tolist() == pytest.approx([0.03, 0.04])


SHAPES = {"matrix": (70, 40), "vector": (33,), "number": (1,)}


def opened(way: type[_Torch] | type[_Kernel], values: dict[str, torch.Tensor]) -> Optimizer:
    """Over copies of the values, the one way or the other wherever they lie."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    config = OptimizerConfig(weight_decay=0.1)
    optimizer = Optimizer(parameters, config)
    optimizer._adamw = way(list(parameters.values()), config, [name != "vector" for name in parameters])
    return optimizer


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(DEVICE) for name, shape in SHAPES.items()}


def train(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        # Odd steps are clipped, even ones are not.
        for name, gradient in drawn(step).items():
            optimizer._parameters[name].grad.add_(gradient if step % 2 else 0.001 * gradient)  # type: ignore[union-attr]
        optimizer.norm()
        optimizer.step(0.01 / step)


def assert_alike(found: Optimizer, expected: Optimizer) -> None:
    ends = [{**one._parameters, **one.tensors()} for one in (found, expected)]
    assert ends[0].keys() == ends[1].keys()
    # Sums may cancel: roundings of steps of 0.01 and of gradients of 0.02 are left.
    near = {"exp_avg": 1e-8, "exp_avg_sq": 0.0, "step": 0.0}
    for name, tensor in ends[0].items():
        atol = near.get(name.split("/")[0], 2e-8)
        torch.testing.assert_close(tensor, ends[1][name], rtol=2e-6, atol=atol, msg=name)
        assert tensor.device == ends[1][name].device
    assert not any(p.grad.any() for p in found._parameters.values())  # type: ignore[union-attr]


def test_the_kernels_steps_are_torchs() -> None:
    optimizers = [opened(way, drawn(0)) for way in (_Kernel, _Torch)]
    assert [optimizer.tensors() for optimizer in optimizers] == [{}, {}]
    for step in range(1, 5):
        for optimizer in optimizers:
            train(optimizer, range(step, step + 1))
        assert_alike(*optimizers)
    assert optimizers[0].tensors()["step/vector"].item() == 4.0


@pytest.mark.parametrize("ways", [(_Torch, _Kernel), (_Kernel, _Torch), (_Kernel, _Kernel)])
def test_a_run_saved_by_one_way_goes_on_by_the_other(ways: tuple[Any, Any]) -> None:
    unbroken = opened(ways[0], drawn(0))
    train(unbroken, range(1, 4))
    resumed = opened(ways[1], {name: p.detach() for name, p in unbroken._parameters.items()})
    train(resumed, range(9, 10))  # What it did before is to be forgotten.
    for name, parameter in resumed._parameters.items():
        parameter.data.copy_(unbroken._parameters[name].data)
    resumed.load_tensors(unbroken.tensors())
    for optimizer in (unbroken, resumed):
        train(optimizer, range(4, 7))
    assert_alike(resumed, unbroken)
    resumed.load_tensors({})
    assert resumed.tensors() == {}


def test_whoever_copies_parameters_sees_the_kernels_step() -> None:
    optimizer = opened(_Kernel, drawn(0))
    before = [parameter._version for parameter in optimizer._parameters.values()]
    optimizer.step(0.01)
    assert [parameter._version for parameter in optimizer._parameters.values()] == [count + 1 for count in before]


def test_the_kernel_is_for_cuda() -> None:
    found = Optimizer({"w": torch.nn.Parameter(torch.zeros(3, device=DEVICE))}, OptimizerConfig())._adamw
    assert isinstance(found, _Kernel if DEVICE == "cuda" else _Torch)
    assert isinstance(Optimizer({"w": torch.nn.Parameter(torch.zeros(3))}, OptimizerConfig())._adamw, _Torch)
