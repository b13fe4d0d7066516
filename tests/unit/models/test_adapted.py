"""Projections under adapters, against PEFT's layer and a product by hand."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.models.adapted import AdaptedOps, Stack
from headrace.models.fused import FusedOps
from headrace.models.joined import join
from headrace.models.ops import ReferenceOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, RANK, ADAPTERS = 24, 4, 3
SCALES = torch.tensor([0.0, 2.0, 0.75, 0.0])
NUMBERS = torch.tensor([0, 1, 2, 2, 0, 1], dtype=torch.int32)


def draw(*shape: int, seed: int) -> Tensor:
    return 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Projections:
    """Layers of one input, and stacks of their adapters; the third adapter's place is empty."""

    def __init__(self, *outs: int, bias: bool, seed: int = 0):
        self.layers = [nn.Linear(SIZE, out, bias=bias, device=DEVICE).requires_grad_(False) for out in outs]
        for i, weight in enumerate(join([draw(out, SIZE, seed=seed + i) for i, out in enumerate(outs)])):
            self.layers[i].weight.data = weight
        self.down = draw(len(outs), ADAPTERS, RANK, SIZE, seed=seed + 10)
        self.up = [draw(out, ADAPTERS, RANK, seed=seed + 20 + i) for i, out in enumerate(outs)]
        self.down[:, 2] = 0
        for up in self.up:
            up[:, 2] = 0
        weights = tuple(layer.weight for layer in self.layers)
        flat = tuple(up.flatten(1) for up in self.up)
        self._stacks = {tuple(map(id, weights)): Stack(self.down.flatten(0, 2), flat)}
        for i, weight in enumerate(weights):
            self._stacks[(id(weight),)] = Stack(self.down[i].flatten(0, 1), flat[i : i + 1])

    def stack_of(self, weights: tuple[Tensor, ...]) -> Stack | None:
        return self._stacks.get(tuple(map(id, weights)))

    def by_hand(self, x: Tensor, i: int) -> Tensor:
        rows = []
        for row, number in zip(x, NUMBERS.tolist(), strict=True):
            out = F.linear(row, self.layers[i].weight, self.layers[i].bias)
            if number:
                a, b = self.down[i, number - 1], self.up[i][:, number - 1]
                out = out + (b @ (a @ row)) * SCALES[number].item()
            rows.append(out)
        return torch.stack(rows)

    def ops(self, fused: bool) -> AdaptedOps:
        ops = AdaptedOps(FusedOps() if fused else ReferenceOps(), self.stack_of, SCALES.to(DEVICE), fused=fused)
        ops.serve(NUMBERS.to(DEVICE))
        return ops


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_every_token_has_its_own_adapter(fused, bias):
    parts = Projections(16, 8, 8, bias=bias)
    ops, x = parts.ops(fused), draw(len(NUMBERS), SIZE, seed=99)
    for i, found in enumerate(ops.linears(x, parts.layers)):
        torch.testing.assert_close(found, parts.by_hand(x, i), atol=1e-5, rtol=0)
    for i, layer in enumerate(parts.layers):
        for project in (ops.linear, ops.branch):
            found = project(x, layer.weight, layer.bias)
            torch.testing.assert_close(found, parts.by_hand(x, i), atol=1e-5, rtol=0)
    other = nn.Linear(SIZE, 5, device=DEVICE).requires_grad_(False)
    torch.testing.assert_close(ops.linear(x, other.weight, other.bias), other(x))


@pytest.mark.parametrize("fused", [False, True])
def test_a_gate_goes_between_adapted_products(fused):
    parts = Projections(16, 16, bias=False)
    x = draw(len(NUMBERS), SIZE, seed=99)
    expected = F.silu(parts.by_hand(x, 0)) * parts.by_hand(x, 1)
    torch.testing.assert_close(parts.ops(fused).gated(x, *parts.layers), expected, atol=1e-5, rtol=0)


def test_where_no_token_has_an_adapter_nothing_is_computed_for_them():
    parts = Projections(16, 16, bias=False)
    ops, x = parts.ops(fused=False), draw(4, SIZE, seed=99)
    ops.serve(None)
    parts.stack_of = None  # type: ignore[assignment]
    plain = ReferenceOps()
    assert torch.equal(ops.gated(x, *parts.layers), plain.gated(x, *parts.layers))
    for found, expected in zip(ops.linears(x, parts.layers), plain.linears(x, parts.layers), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_pefts_layer(dtype):
    model = nn.Sequential(nn.Linear(SIZE, 16, bias=False)).to(dtype)
    peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, lora_alpha=1.3 * RANK, target_modules=["0"]), model)
    layer = model[0]
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.data = draw(*parameter.shape, seed=i).cpu().to(dtype)
    model.requires_grad_(False)
    x = draw(50, SIZE, seed=9).cpu().to(dtype)
    down = torch.zeros(2, RANK, SIZE, dtype=dtype)
    up = torch.zeros(16, 2, RANK, dtype=dtype)
    down[1], up[:, 1] = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    stack = Stack(down.flatten(0, 1), (up.flatten(1),))
    ops = AdaptedOps(ReferenceOps(), lambda weights: stack, torch.tensor([0.0, 1.0, 1.3]))
    ops.serve(torch.full((50,), 2, dtype=torch.int32))
    found, expected = ops.linear(x, layer.base_layer.weight, None), model(x)
    # Zeros in a sum may change its order, and with that the last bit of a few.
    assert (found != expected).float().mean() < 0.02
    torch.testing.assert_close(found, expected)
