from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headrace.models.attention import CacheContext, CachedContext, PackedContext
from headrace.models.config import ModelConfig
from headrace.models.fused import FusedOps
from headrace.models.io import random_model
from headrace.models.joined import join, joined_names, side_by_side
from headrace.models.ops import ReferenceOps, Rotation
from headrace.models.quantized import Fp8Ops, quantize_together
from headrace.models.quantized_fused import FusedFp8Ops
from headrace.models.rope_config import RopeConfig
from headrace.models.shapes import parameter_shapes
from headrace.models.transformer import CausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates where it should round to bfloat16.
HALF_DTYPES = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}, "biased": {"mlp_bias": True}}


def config_of(family: str) -> ModelConfig:
    return ModelConfig(
        family="llama" if family == "biased" else family,
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        initializer_range=0.3,
        rope=RopeConfig(theta=100.0),
        **FAMILIES[family],
    )


def model_of(family: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Without gradients; norms and biases are random too, or they would test nothing."""
    model = random_model(config_of(family), 0, dtype=dtype, device=DEVICE).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(DEVICE, dtype)
    return model


def with_ops(model: CausalLM, ops: ReferenceOps) -> CausalLM:
    """The same weights over another back end."""
    other = CausalLM(model.config, ops)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.requires_grad_(False)


def laid_together(model: CausalLM) -> CausalLM:
    state = model.state_dict()
    for names in joined_names(model.config):
        state |= dict(zip(names, join([state[name] for name in names]), strict=True))
    other = CausalLM(model.config, model.ops)
    other.load_state_dict(state, assign=True)
    return other.requires_grad_(False)


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, 31, (count,), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def hidden_of(model: CausalLM, lengths: tuple[int, ...] = (5, 1, 9)) -> Tensor:
    context = PackedContext(lengths, DEVICE)
    return model(tokens_of(sum(lengths)), context.positions, context)


class CountingOps(FusedOps):
    """Remembers of each group of projections whether it was one product."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[bool] = []

    def linears(self, x, layers):
        parts = super().linears(x, layers)
        storages = {part.untyped_storage().data_ptr() for part in parts}
        self.joined.append(len(storages) == 1)
        return parts

    def gated(self, x, gate, up):
        before = len(self.joined)
        out = super().gated(x, gate, up)
        if len(self.joined) == before:
            self.joined.append(True)
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_over_kernels_is_the_reference_model(family):
    reference = model_of(family)
    expected = hidden_of(reference)
    assert expected.std() > 0.1
    for model in (with_ops(reference, FusedOps()), laid_together(with_ops(reference, FusedOps()))):
        torch.testing.assert_close(hidden_of(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_in_half_precision_it_is_no_farther_from_the_truth_than_the_reference_model(dtype):
    reference = model_of("qwen3", dtype)
    exact = hidden_of(with_ops(reference, ReferenceOps()).float())
    rounded, fused = hidden_of(reference).float(), hidden_of(with_ops(reference, FusedOps())).float()
    assert (fused - exact).abs().mean() < 1.3 * (rounded - exact).abs().mean()


def test_projections_are_one_product_exactly_where_their_weights_lie_together():
    apart, together = CountingOps(), CountingOps()
    model = model_of("qwen2")
    hidden_of(with_ops(model, apart))
    hidden_of(laid_together(with_ops(model, together)))
    assert apart.joined == [False] * 4
    assert together.joined == [True] * 4


def test_the_gate_of_quantised_layers_is_of_quantised_products():
    layers = [nn.Linear(32, 48, bias=False, device=DEVICE).requires_grad_(False) for _ in range(2)]
    for layer, weight in zip(layers, join([layer.weight for layer in layers]), strict=True):
        layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 32, device=DEVICE)
    expected = Fp8Ops(quantize_together).gated(x, *layers)
    torch.testing.assert_close(FusedFp8Ops(quantize_together).gated(x, *layers), expected, atol=1e-5, rtol=1e-5)
    assert (ReferenceOps().gated(x, *layers) - expected).abs().max() > 1e-3


def test_biases_are_added_wherever_they_lie():
    layers = [nn.Linear(8, size, device=DEVICE).requires_grad_(False) for size in (4, 6, 2)]
    x = torch.randn(3, 8, device=DEVICE)
    expected = ReferenceOps().linears(x, layers)
    for layer, weight in zip(layers, join([layer.weight for layer in layers]), strict=True):
        layer.weight = nn.Parameter(weight, requires_grad=False)
    apart = FusedOps().linears(x, layers)
    for layer, bias in zip(layers, join([layer.bias for layer in layers]), strict=True):
        layer.bias = nn.Parameter(bias, requires_grad=False)
    together = FusedOps().linears(x, layers)
    layers[1].bias = None
    without = FusedOps().linears(x, layers)[1]
    torch.testing.assert_close(apart, expected)
    torch.testing.assert_close(together, expected)
    torch.testing.assert_close(without, x @ layers[1].weight.T)


def test_a_wrapped_projection_is_called_though_the_weights_lie_together():
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Linear):
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    model = laid_together(model_of("llama"))
    fused = laid_together(with_ops(model, FusedOps()))
    plain = hidden_of(fused)
    for each in (model, fused):
        each.model.layers[0].self_attn.k_proj = Doubled(each.model.layers[0].self_attn.k_proj)
    adapted = hidden_of(fused)
    assert (adapted - plain).abs().max() > 0.1
    torch.testing.assert_close(adapted, hidden_of(model), atol=1e-4, rtol=1e-4)


class PagedByHand:
    """One sequence over a cache of pages in a scattered order; attention in plain PyTorch."""

    def __init__(self, config: ModelConfig, rows: Tensor):
        shape = (config.num_layers, config.num_kv_heads, 4, 4, config.head_dim)
        self._keys, self._values = torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)
        self.rows = rows

    def keys(self, layer: int) -> Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        return self._values[layer]

    def attend_cached(self, layer: int, q_thd: Tensor) -> Tensor:
        k, v = (cache[layer].flatten(1, 2)[:, self.rows].transpose(0, 1) for cache in (self._keys, self._values))
        return PackedContext([len(q_thd)], DEVICE).attend(layer, q_thd, k, v)

    def attend_projected(
        self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, rotation: Rotation
    ) -> Tensor | None:
        return None

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        raise AssertionError("the cache was to be written by the kernel")


def test_over_a_cache_of_pages_keys_are_rotated_into_their_rows():
    model = model_of("qwen3")
    rows = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 12], device=DEVICE)
    context = PagedByHand(model.config, rows)
    assert isinstance(context, CacheContext)
    assert not isinstance(CachedContext(2), CacheContext)
    found = laid_together(with_ops(model, FusedOps()))(tokens_of(9), torch.arange(9, device=DEVICE), context)
    torch.testing.assert_close(found, hidden_of(model, (9,)), atol=1e-4, rtol=1e-4)


def test_a_tensor_that_wants_a_gradient_is_refused_unless_gradients_are_off():
    model = with_ops(model_of("llama"), FusedOps())
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="inference only"):
        hidden_of(model)
    with torch.no_grad():
        assert hidden_of(model).isfinite().all()


def test_joining_copies_into_one_block_in_order():
    first, second = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True)
    joined = join([first, second])
    assert torch.equal(joined[0], first)
    assert torch.equal(joined[1], second)
    view = side_by_side(joined)
    assert view is not None
    assert torch.equal(view, torch.cat((first, second)))
    assert view.data_ptr() == joined[0].data_ptr() != first.data_ptr()
    joined[1].zero_()
    assert torch.equal(view[2:], torch.zeros(4, 3))
    assert side_by_side([joined[1], joined[0]]) is None
    assert side_by_side([first, second]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_joined_names_are_those_of_the_model_s_parameters(family):
    config = config_of(family)
    names = joined_names(config)
    assert {name for group in names for name in group} == {
        name
        for name in parameter_shapes(config)
        if any(f".{part}_proj." in name for part in ("q", "k", "v", "gate", "up"))
    }
    layer = "model.layers.1"
    assert tuple(f"{layer}.self_attn.{part}_proj.weight" for part in "qkv") in names
    assert (f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight") in names
