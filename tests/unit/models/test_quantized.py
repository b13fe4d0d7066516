from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headrace.models.attention import PackedContext
from headrace.models.joined import join
from headrace.models.ops import ReferenceOps, Rotation
from headrace.models.quantized import (
    FLOAT8,
    Fp8Ops,
    QuantizedRows,
    dequantize_rows,
    product,
    quantize_rows,
    quantize_together,
    to_float8,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers_of(*sizes: int, bias: bool = True) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(32, size, bias=bias).requires_grad_(False) for size in sizes]


def test_a_row_is_scaled_so_that_its_largest_element_is_float8_s_largest():
    rows = quantize_rows(torch.tensor([[1.0, -2.0, 0.5], [448.0, 3.0, 0.0]]))
    assert rows.values.dtype == FLOAT8
    assert rows.values.float().tolist() == [[224.0, -448.0, 112.0], [448.0, 3.0, 0.0]]
    assert rows.scales.tolist() == [[pytest.approx(2 / 448)], [1.0]]
    assert dequantize_rows(rows)[1].tolist() == [448.0, 3.0, 0.0]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_an_element_comes_back_within_half_a_step_of_float8(size):
    x = size * draw(64, 100)
    back = dequantize_rows(quantize_rows(x))
    # Three bits after the first; below the normal numbers, half of the smallest one.
    least = x.abs().amax(-1, keepdim=True) / 448 * 2**-10
    assert ((back - x).abs() <= torch.maximum(x.abs() / 16, least) * (1 + 1e-5)).all()


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_numbers():
    x = torch.zeros(3, 4)
    x[1] = torch.tensor([1e-40, -1e-38, 0.0, 3e-39])
    x[2, 1] = 1e-30
    rows = quantize_rows(x)
    assert rows.scales.gt(0).all()
    back = dequantize_rows(rows)
    assert back[:2].abs().max() < 1e-35
    assert back[2].tolist() == [0.0, pytest.approx(1e-30), 0.0, 0.0]


def test_what_is_not_a_number_stays_visible():
    x = draw(2, 4)
    x[0, 1], x[1, 2] = float("nan"), float("inf")
    assert dequantize_rows(quantize_rows(x)).isnan().any(1).tolist() == [True, True]


def test_without_a_scale_what_is_out_of_range_saturates():
    x = torch.tensor([449.0, -1e30, float("inf"), 448.0, 17.5, 0.3, 2**-9, 2**-11, float("nan")])
    found = to_float8(x)
    assert found.dtype == FLOAT8
    assert found.float()[:-1].tolist() == [448.0, -448.0, 448.0, 448.0, 18.0, 0.3125, 2**-9, 0.0]
    assert found.float()[-1].isnan()
    assert torch.equal(to_float8(found.float()).view(torch.uint8), found.view(torch.uint8))


def test_a_product_is_that_of_the_rows_it_was_given():
    x = QuantizedRows(torch.tensor([[1.0, 2.0], [4.0, 0.0]]).to(FLOAT8), torch.tensor([[0.5], [2.0]]))
    weight = QuantizedRows(torch.tensor([[1.0, 1.0], [0.0, 3.0]]).to(FLOAT8), torch.tensor([[1.0], [10.0]]))
    assert product(x, weight, torch.float32).tolist() == [[1.5, 30.0], [8.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_is_near_the_plain_one_and_its_bias_is_added_after(dtype):
    [layer] = layers_of(48)
    layer = layer.to(dtype)
    x = draw(5, 32).to(dtype)
    found = Fp8Ops(quantize_together).linear(x, layer.weight, layer.bias)
    weights = quantize_rows(layer.weight)
    assert torch.equal(found, product(quantize_rows(x), weights, dtype) + layer.bias)
    plain = ReferenceOps().linear(x, layer.weight, layer.bias)
    assert 0 < (found - plain).float().std() < 0.05 * plain.float().std()


@pytest.mark.parametrize("biases", ["apart", "together", "some", "none"])
def test_joined_projections_are_the_same_as_each_alone(biases):
    layers = layers_of(16, 8, 8, bias=biases != "none")
    if biases == "together":
        for layer, bias in zip(layers, join([layer.bias for layer in layers]), strict=True):
            layer.bias = nn.Parameter(bias, requires_grad=False)
    elif biases == "some":
        layers[1].bias = None
    asked: list[int] = []

    def rows_of(weights: tuple[Tensor, ...]) -> QuantizedRows:
        asked.append(len(weights))
        return quantize_together(weights)

    ops, x = Fp8Ops(rows_of), draw(5, 32)
    together = ops.linears(x, layers)
    assert asked == [3]
    torch.testing.assert_close(together, [ops.linear(x, layer.weight, layer.bias) for layer in layers])


def test_a_wrapped_projection_is_called_and_the_others_are_quantised():
    layers = layers_of(16, 8)
    wrapped, ops, x = nn.Sequential(layers[0]), Fp8Ops(quantize_together), draw(5, 32)
    first, second = ops.linears(x, [wrapped, layers[1]])
    assert torch.equal(first, layers[0](x))
    assert torch.equal(second, ops.linear(x, layers[1].weight, layers[1].bias))


def test_weights_that_have_no_rows_are_used_as_they_are():
    layers, x, reference = layers_of(16, 8), draw(5, 32), ReferenceOps()
    for ops in (Fp8Ops(lambda weights: None), Fp8Ops(None, kv=True)):
        assert torch.equal(ops.branch(x, layers[0].weight, None), reference.linear(x, layers[0].weight, None))
        for found, expected in zip(ops.linears(x, layers), reference.linears(x, layers), strict=True):
            assert torch.equal(found, expected)


def test_keys_and_values_are_attended_to_as_a_float8_cache_gives_them_back():
    q, k, v = draw(6, 4, 8), draw(6, 2, 8, seed=1), draw(6, 2, 8, seed=2)
    v[3] *= 1000
    seen: list[Tensor] = []

    class Seeing(PackedContext):
        def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
            seen.extend((k_tgd, v_tgd))
            return super().attend(layer, q_thd, k_tgd, v_tgd)

    still = Rotation(torch.ones(6, 1, 8), torch.zeros(6, 1, 8), None, None, 0.0)
    found = Fp8Ops(kv=True).attention(q, k, v, still, 0, Seeing([6]))
    rounded_k, rounded_v = to_float8(k).float(), to_float8(v).float()
    assert torch.equal(seen[0], rounded_k)
    assert torch.equal(seen[1], rounded_v)
    assert rounded_v.abs().max() == 448
    assert torch.equal(found, PackedContext([6]).attend(0, q, rounded_k, rounded_v))
