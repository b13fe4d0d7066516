from __future__ import annotations

import math

import torch
from torch import nn

from headrace.models.ops import ReferenceOps

ops = ReferenceOps()


def test_rms_norm_divides_by_the_root_mean_square():
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = ops.rms_norm(x, weight, 0.75)  # mean square 6.25, so the root is of 7
    torch.testing.assert_close(found, torch.tensor([[3.0, -8.0, 0.0, 0.0]]) / math.sqrt(7))


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient():
    x = torch.zeros(2, 4, requires_grad=True)
    ops.rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1000.0))


def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


def test_rope_turns_each_pair_of_halves_by_its_angle():
    angle = math.pi / 2
    cos = torch.tensor([1.0, math.cos(angle)] * 2).view(1, 1, 4)
    sin = torch.tensor([-0.0, -math.sin(angle), 0.0, math.sin(angle)]).view(1, 1, 4)
    q = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    turned, turned_twice = ops.rope(q, 2 * q, cos, sin)
    torch.testing.assert_close(turned, torch.tensor([1.0, -4.0, 3.0, 2.0]).view(1, 1, 4))
    torch.testing.assert_close(turned_twice, 2 * turned)


def test_gated_silu_is_the_product_of_a_gate_and_its_input():
    gate, up = torch.tensor([0.0, 2.0]), torch.tensor([5.0, 3.0])
    torch.testing.assert_close(ops.gated_silu(gate, up), torch.tensor([0.0, 6.0 / (1 + math.exp(-2.0))]))


def test_linears_reads_plain_layers_and_calls_all_others():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, special = nn.Linear(4, 3), Doubled(4, 2, bias=False)
    x = torch.randn(5, 4)
    found = ops.linears(x, (plain, special))
    torch.testing.assert_close(found[0], x @ plain.weight.T + plain.bias)
    torch.testing.assert_close(found[1], 2 * (x @ special.weight.T))
