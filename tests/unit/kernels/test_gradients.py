"""Backward passes against autograd over the reference, and the head's kernels against its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from headrace.models.attention import PackedContext
from headrace.models.config import ModelConfig
from headrace.models.joined import abreast, join, joined_names
from headrace.models.logprobs import token_logprobs
from headrace.models.ops import ReferenceOps, Rotation
from headrace.models.trained import TrainedOps
from headrace.models.transformer import CausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
reference, trained = ReferenceOps(), TrainedOps()
EPS = 1e-6


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(call, *inputs: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, gradients of the inputs) under a weighted sum of all outputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = call(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    total = sum((out * draw(*out.shape, seed=9 + i)).sum() for i, out in enumerate(outputs))
    return [out.detach() for out in outputs], list(torch.autograd.grad(total, leaves))


def assert_alike(call, other, *inputs: torch.Tensor) -> None:
    (found, of_found), (expected, of_expected) = gradients(call, *inputs), gradients(other, *inputs)
    for one, another in zip([*found, *of_found], [*expected, *of_expected], strict=True):
        torch.testing.assert_close(one, another, rtol=2e-5, atol=2e-5)


def test_projections_of_one_input():
    layers = [torch.nn.Linear(12, width, bias=False) for width in (7, 1, 20)]

    def by(ops):
        def call(x, *weights):
            for layer, weight in zip(layers, weights, strict=True):
                layer._parameters["weight"] = weight
            return tuple(ops.linears(x, layers))

        return call

    weights = [draw(layer.out_features, 12, seed=layer.out_features) for layer in layers]
    assert_alike(by(trained), by(reference), draw(9, 12), *weights)


def siblings(widths, together: bool, *, wants=(True, True, True), mastered=()) -> list[torch.nn.Linear]:
    weights = [draw(width, 16, seed=i) for i, width in enumerate(widths)]
    layers = [torch.nn.Linear(16, width, bias=False) for width in widths]
    for i, (layer, weight) in enumerate(zip(layers, join(weights) if together else weights, strict=True)):
        layer.weight = torch.nn.Parameter(weight, requires_grad=wants[i])
        if i in mastered:
            layer.weight.master = torch.nn.Parameter(weight.clone())
            layer.weight.master.grad = torch.full(weight.shape, 2.0, device=DEVICE)
    return layers


def gradient_of(layer: torch.nn.Linear) -> torch.Tensor | None:
    master = getattr(layer.weight, "master", None)
    assert master is None or layer.weight.grad is None
    return layer.weight.grad if master is None else master.grad


def assert_same(found, expected) -> None:
    """Up to the order of summation, measured against a tensor's largest number."""
    near = 1e-5 if DEVICE == "cuda" else 1e-6
    for one, another in zip(found, expected, strict=True):
        if one is None or another is None:
            assert one is another
        else:
            torch.testing.assert_close(one, another, rtol=0, atol=near * max(1.0, float(another.abs().max())))


@pytest.mark.parametrize("mastered", [(), (0, 1, 2), (1,)])
@pytest.mark.parametrize("wants", [(True, True, True), (False, True, False), (False, False, False)])
@pytest.mark.parametrize("of_x", [True, False])
def test_projections_side_by_side_are_one_product(wants, mastered, of_x):
    mastered = [i for i in mastered if wants[i]]
    found = []
    for together in (False, True):
        x = draw(9, 16, seed=7).requires_grad_(of_x)
        layers = siblings((24, 8, 8), together, wants=wants, mastered=mastered)
        outputs = trained.linears(x, layers)
        assert (len({out.untyped_storage().data_ptr() for out in outputs}) == 1) == together
        if any(wants) or of_x:
            sum((out * draw(*out.shape, seed=9 + i)).sum() for i, out in enumerate(outputs)).backward()
        found.append([*(out.detach() for out in outputs), x.grad, *map(gradient_of, layers)])
    assert_same(found[1], found[0])


def test_gates_and_rotations_of_columns_give_gradients_that_are_columns_again():
    angle = draw(9, 1, 4, seed=3)
    rotation = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    found = []
    for together in (False, True):
        x, weights = draw(9, 16, seed=7).requires_grad_(), [draw(8, seed=seed).requires_grad_() for seed in (4, 5)]
        layers, mlp = siblings((32, 16, 16), together), siblings((40, 40), together)
        q, k, v = trained.linears(x, layers)
        gate, up = trained.linears(x, mlp)
        given: dict[int, torch.Tensor] = {}
        for i, out in enumerate((q, k, v, gate, up)):
            out.register_hook(partial(given.__setitem__, i))
        heads = [out.view(9, -1, 8) for out in (q, k, v)]
        attended = trained.attention(*heads, Rotation(*rotation, *weights, EPS), 0, Kept())
        gated = trained.gated_silu(gate, up)
        ((attended * draw(9, 64, seed=8)).sum() + (gated * draw(9, 40, seed=9)).sum()).backward()
        assert [abreast([given[i], given[i + 1]]) is not None for i in (0, 1, 3)] == [together, False, together]
        found.append(
            [attended.detach(), gated.detach(), x.grad, *(w.grad for w in weights), *map(gradient_of, layers + mlp)]
        )
    assert_same(found[1], found[0])


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["in order", "exchanged"])
def test_gradients_that_are_columns_of_one_matrix_are_joined_only_in_order(order):
    widths, x = (8, 8, 8), draw(9, 16, seed=7)
    layers = siblings(widths, True)
    columns = draw(9, 30, seed=8)[:, 2:26].split(8, 1)
    grads = [columns[i] for i in order]
    leaf = x.clone().requires_grad_()
    torch.autograd.backward(trained.linears(leaf, layers), grads)
    assert_same([leaf.grad], [sum(grad @ layer.weight.detach() for grad, layer in zip(grads, layers, strict=True))])
    assert_same(map(gradient_of, layers), [grad.t() @ x for grad in grads])


def test_gradients_of_any_strides_are_no_trouble_to_joined_projections():
    found = []
    for together in (False, True):
        x, layers = draw(9, 16, seed=7).requires_grad_(), siblings((8, 8, 8), together)
        first, second, third = trained.linears(x, layers)
        # One number for all; transposed; twice the same one.
        (first.sum() + (second.t() @ draw(9, 5, seed=1)).square().sum() + (third * third).sum()).backward()
        found.append([x.grad, *map(gradient_of, layers)])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("row_stride", [0, 3, 30])
def test_matrices_are_abreast_where_the_columns_of_each_begin_at_the_end_of_the_last_ones(row_stride):
    block = draw(300)
    first, second, third = (
        block.as_strided((4, width), (row_stride, 1), begin) for begin, width in ((5, 8), (13, 3), (16, 1))
    )
    assert torch.equal(abreast([first, second, third]), torch.cat([first, second, third], 1))
    assert abreast([second, first]) is None
    assert abreast([first, third]) is None
    assert abreast([first, block.as_strided((4, 3), (row_stride + 1, 1), 13)]) is None
    assert abreast([first, block.as_strided((3, 3), (row_stride, 1), 13)]) is None
    assert abreast([first, second.clone()]) is None


def test_a_weights_gradient_is_added_to_its_masters_in_float32():
    x, grad = draw(5, 12).bfloat16(), draw(5, 20, seed=1).bfloat16()
    weight, other = (torch.nn.Parameter(draw(20, 12, seed=seed).bfloat16()) for seed in (2, 3))
    weight.master = torch.nn.Parameter(weight.data.float())
    weight.master.grad = torch.full((20, 12), 100.0, device=DEVICE)
    layers = [torch.nn.Linear(12, 20, bias=False) for _ in range(2)]
    for layer, one in zip(layers, (weight, other), strict=True):
        layer.weight = one
    first, second = trained.linears(x, layers)
    ((first + second) * grad).sum().backward()
    expected = grad.float().t() @ x.float()
    torch.testing.assert_close(weight.master.grad, 100 + expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(other.grad, expected.bfloat16())
    assert weight.grad is None

    (trained.linear(x, weight, None) * grad).sum().backward()
    torch.testing.assert_close(weight.master.grad, 100 + 2 * expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("count", [3, 700])
def test_norms_weights_gradients_are_added_to_their_masters_in_float32(count):
    x, other, grad = (draw(count, 40, seed=seed).bfloat16() for seed in range(3))
    plain, weight = (torch.nn.Parameter((1 + draw(40, seed=4)).bfloat16()) for _ in range(2))
    weight.master = torch.nn.Parameter(weight.data.float())
    weight.master.grad = torch.full((40,), 100.0, device=DEVICE)
    for one in (plain, weight):
        normed, _ = trained.add_rms_norm(x, other, one, EPS)
        ((normed + trained.rms_norm(x, one, EPS)) * grad).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.master.grad - 100, plain.grad.float(), rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("rows", [None, 2])
def test_a_heads_gradient_is_added_to_its_masters(rows):
    hidden, targets = draw(5, 8), torch.arange(5, device=DEVICE)
    plain, head = (torch.nn.Parameter(draw(30, 8, seed=1)) for _ in range(2))
    head.master = torch.nn.Parameter(head.data.clone())
    head.master.grad = torch.ones(30, 8, device=DEVICE)
    for one in (plain, head):
        logprobs, entropy = trained.token_logprobs(hidden, one, targets, chunk_rows=rows)
        (logprobs.sum() + 0.3 * entropy.sum()).backward()
    torch.testing.assert_close(head.master.grad, 1 + plain.grad, rtol=1e-5, atol=1e-5)
    assert head.grad is None


# Several rows a turn, the last ones not all there; several turns; one row a turn.
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 80), (1300, 33), (1030, 600), (3, 1500)])
def test_norms(rows, width):
    x, residual, weight = draw(rows, width), draw(rows, width, seed=1), draw(width, seed=2)
    assert_alike(
        lambda *args: trained.rms_norm(*args, EPS), lambda *args: reference.rms_norm(*args, EPS), x, weight
    )
    assert_alike(
        lambda *args: trained.add_rms_norm(*args, EPS),
        lambda *args: reference.add_rms_norm(*args, EPS),
        *(x, residual, weight),
    )


class Kept:
    """Attention that gives back what it is asked with."""

    def attend(self, layer, q, k, v):
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "groups", "dim"), [(1, 1, 1, 8), (9, 6, 2, 16), (70, 4, 4, 20)])
def test_rotations(tokens, heads, groups, dim, normed):
    q, k, v = draw(tokens, heads, dim), draw(tokens, groups, dim, seed=1), draw(tokens, groups, dim, seed=2)
    angle = draw(tokens, 1, dim // 2, seed=3)
    cos = torch.cat([angle.cos()] * 2, -1)
    sin = torch.cat([-angle.sin(), angle.sin()], -1)
    weights = [draw(dim, seed=4), draw(dim, seed=5)] if normed else []

    def by(ops):
        return lambda q, k, v, *norms: ops.attention(
            q, k, v, Rotation(cos, sin, *(norms or (None, None)), EPS), 0, Kept()
        )

    assert_alike(by(trained), by(reference), q, k, v, *weights)


@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (40, 129)])
def test_gates(shape):
    assert_alike(trained.gated_silu, reference.gated_silu, draw(*shape), draw(*shape, seed=1))

    def of_columns(ops):
        return lambda both: ops.gated_silu(*both.chunk(2, -1))

    assert_alike(of_columns(trained), of_columns(reference), draw(shape[0], 2 * shape[1]))


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(1, 4, 5), (11, 8, 300), (6, 16, 5000)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "each"])
def test_heads(tokens, width, vocabulary, temperature, rows):
    hidden, head = draw(tokens, width), draw(vocabulary, width, seed=1)
    targets = torch.arange(tokens, device=DEVICE) * 7 % vocabulary
    at = 0.5 + draw(tokens, seed=2).abs() if temperature == "each" else temperature
    assert_alike(
        lambda *args: trained.token_logprobs(*args, targets, at, chunk_rows=rows),
        lambda *args: token_logprobs(*args, targets, at, chunk_rows=rows),
        *(hidden, head),
    )


def test_gradients_that_are_one_number_for_all_rows_are_no_trouble():
    def sums(ops):
        def call(x, weight, head):
            normed = ops.rms_norm(x, weight, EPS)
            logprobs, entropy = ops.token_logprobs(
                normed, head, torch.zeros(len(x), dtype=torch.long, device=DEVICE)
            )
            more = ops.rms_norm(x, weight, EPS).sum() + ops.gated_silu(x, normed).sum()
            return (logprobs.sum() + entropy.sum() + more)[None]

        return call

    assert_alike(sums(trained), sums(reference), draw(5, 8), draw(8, seed=1), draw(30, 8, seed=2))


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1000.0], [-1000.0]], device=DEVICE)
    head = torch.tensor([[1.0], [0.5], [-1.0]], device=DEVICE)
    logprobs, entropy = trained.token_logprobs(hidden, head, torch.tensor([0, 0], device=DEVICE))
    assert logprobs.tolist() == pytest.approx([0.0, -2000.0])
    assert entropy.tolist() == pytest.approx([0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_a_whole_model_has_the_reference_s_gradients(together):
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3", "vocab_size": 40, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": EPS,
        }
    )  # fmt: skip
    tokens = torch.arange(23, device=DEVICE) * 5 % 40
    context = PackedContext([9, 3, 11], DEVICE)
    found = []
    torch.manual_seed(0)
    model = CausalLM(config).to(DEVICE)
    if together:
        for names in joined_names(config):
            parameters = [model.get_parameter(name) for name in names]
            for parameter, joined in zip(parameters, join(parameters), strict=True):
                parameter.data = joined
    for ops in (reference, trained):
        model.use(ops).zero_grad()
        hidden = model(tokens, context.positions, context)
        logprobs, entropy = ops.token_logprobs(hidden, model.head_weight, tokens.roll(-1))
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5)
