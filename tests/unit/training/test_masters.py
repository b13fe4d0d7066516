from __future__ import annotations

import torch
from torch import nn

from headrace.models import side_by_side
from headrace.training.backends.masters import ALIGN, Masters
from headrace.training.config import OptimizerConfig
from headrace.training.optimizer import Optimizer


def test_a_parameter_that_wants_no_gradient_is_cast_like_the_others() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    masters = Masters(dict(model.named_parameters()), torch.bfloat16)
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2
    assert not masters.parameters["bias"].requires_grad
    with torch.no_grad():
        masters.parameters["bias"].fill_(1 + 2**-12)
    masters.cast()
    assert model.bias.tolist() == [1.0, 1.0]
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert masters.parameters["bias"].grad is None
    assert masters.parameters["weight"].grad.tolist() == [[1.0, 1.0]] * 2
    assert model.weight.grad is None
    with masters.in_place():
        assert model.bias.tolist() == [1 + 2**-12] * 2
    assert model.bias.dtype == torch.bfloat16


def test_casts_lie_one_behind_the_other_and_keep_their_places() -> None:
    layers = nn.ModuleDict(
        {name: nn.Linear(8, width, bias=False) for name, width in (("q", 6), ("k", 2), ("v", 2))}
    )
    layers["odd"], layers["last"] = nn.Linear(3, 1, bias=False), nn.Linear(8, 1, bias=False)
    expected = {name: p.detach().bfloat16() for name, p in layers.named_parameters()}
    masters = Masters(dict(layers.named_parameters()), torch.bfloat16)

    def check() -> None:
        own = dict(layers.named_parameters())
        together = side_by_side([own[f"{name}.weight"] for name in "qkv"])
        assert together is not None
        assert torch.equal(together, torch.cat([expected[f"{name}.weight"] for name in "qkv"]))
        assert all(torch.equal(own[name], values) for name, values in expected.items())
        assert all(p.data_ptr() % ALIGN == 0 for p in own.values())

    check()
    with masters.in_place():
        assert len({p.untyped_storage().data_ptr() for p in layers.parameters()}) == 5
    with torch.no_grad():
        for master in masters.parameters.values():
            master.mul_(3)
    expected = {name: master.detach().bfloat16() for name, master in masters.parameters.items()}
    masters.cast()
    check()


def test_no_parameters_have_no_masters() -> None:
    masters = Masters({}, torch.bfloat16)
    masters.cast()
    with masters.in_place():
        assert masters.parameters == {}


def test_float32_parameters_are_their_own_masters() -> None:
    model = nn.Linear(2, 2)
    masters = Masters(dict(model.named_parameters()), torch.float32)
    assert masters.parameters["weight"] is model.weight
    masters.cast()
    with masters.in_place():
        assert model.weight.dtype == torch.float32


def test_masters_are_cast_once_for_each_change() -> None:
    model = nn.Linear(2, 2)
    masters = Masters(dict(model.named_parameters()), torch.bfloat16)
    casts = masters._casts
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1
        casts()

    masters._casts = counted
    optimizer = Optimizer(masters.parameters, OptimizerConfig())
    for expected in (1, 2):
        for _ in range(3):
            masters.cast()
        assert count == expected
        assert torch.equal(model.weight, masters.parameters["weight"].bfloat16())
        for master in masters.parameters.values():
            master.grad = torch.ones_like(master)
        optimizer.step(0.5)
    masters.parameters["weight"].detach().copy_(torch.zeros(2, 2))
    masters.cast()
    assert not model.weight.any()
