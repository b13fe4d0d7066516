"""The same bits in any batch, and the reference's values and gradients within rounding.

Plain PyTorch is tested at full length; the Triton kernels, in their interpreter where there is no GPU, on less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from headrace.errors import HeadraceError
from headrace.models import exact_plain
from headrace.models.attention import AttentionContext, CachedContext, PackedContext
from headrace.models.config import ModelConfig
from headrace.models.exact import ExactOps
from headrace.models.io import random_model
from headrace.models.joined import join
from headrace.models.logprobs import Support
from headrace.models.ops import ReferenceOps, Rotation
from headrace.models.rope_config import RopeConfig
from headrace.models.transformer import CausalLM
from interpreted import attention_apart, product_apart, shaken_apart, share

VOCAB = 37
FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
LENGTHS = [70, 1, 130, 64, 9, 65]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_of(family: str, ops: ExactOps | ReferenceOps, **changes: int) -> CausalLM:
    """No size is a multiple of 16. Norms and biases are random too, or they would test nothing."""
    sizes = {"hidden_size": 36, "intermediate_size": 52, "num_heads": 6, "num_kv_heads": 2, "head_dim": 12}
    config = ModelConfig(
        family=family,
        vocab_size=VOCAB,
        num_layers=2,
        initializer_range=0.3,
        rope=RopeConfig(theta=100.0),
        **{**sizes, **changes},
        **FAMILIES[family],
    )
    model = random_model(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.use(ops)


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(3))


def packed_hidden(model: CausalLM, tokens: Tensor, lengths: list[int]) -> Tensor:
    context = PackedContext(lengths)
    return model(tokens, context.positions, context)


@pytest.fixture(params=[2, 3])
def threads(request):
    """What is compared with a single one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ── Bits ─────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_alone_packed_and_in_pieces_gives_the_same_bits(family):
    model, tokens = model_of(family, ExactOps()), tokens_of(sum(LENGTHS))
    together = packed_hidden(model, tokens, LENGTHS).split(LENGTHS)
    for expected, own in zip(together, tokens.split(LENGTHS), strict=True):
        assert torch.equal(packed_hidden(model, own, [len(own)]), expected)
        assert torch.equal(hidden_in_pieces(model, own, [1] * len(own)), expected)
        assert torch.equal(hidden_in_pieces(model, own, [len(own) // 3, len(own) - len(own) // 3]), expected)


def hidden_in_pieces(model: CausalLM, tokens: Tensor, pieces: list[int]) -> Tensor:
    cache, found = CachedContext(model.config.num_layers), []
    for piece in tokens.split([size for size in pieces if size]):
        positions = torch.arange(cache.length, cache.length + len(piece), device=tokens.device)
        found.append(model(piece, positions, cache))
    return torch.cat(found)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_threads_does_not_matter(family, threads):
    model, tokens = model_of(family, ExactOps()), tokens_of(sum(LENGTHS))
    torch.set_num_threads(1)
    expected = packed_hidden(model, tokens, LENGTHS)
    torch.set_num_threads(threads)
    assert torch.equal(packed_hidden(model, tokens, LENGTHS), expected)
    assert torch.equal(packed_hidden(model, tokens[:70], [70]), expected[:70])


@torch.no_grad()
def test_what_else_is_in_the_pass_does_not_matter():
    model, tokens = model_of("qwen3", ExactOps()), tokens_of(100)
    alone = packed_hidden(model, tokens, [100])
    others = tokens_of(333).flip(0)
    crowd = torch.cat([others[:200], tokens, others[200:]])
    assert torch.equal(packed_hidden(model, crowd, [3, 150, 47, 100, 133])[200:300], alone)


@pytest.mark.parametrize("truncated", [False, True])
def test_a_log_prob_alone_is_the_log_prob_in_a_batch(truncated, threads):
    torch.set_num_threads(1)
    hidden, head, targets, support = scored(90, truncated)
    temperature = torch.linspace(0.5, 1.5, 90)
    together, _ = ExactOps().token_logprobs(hidden, head, targets, temperature, support)
    chunked, _ = ExactOps().token_logprobs(hidden, head, targets, temperature, support, chunk_rows=7)
    torch.set_num_threads(threads)
    assert torch.equal(together, chunked)
    for row in range(0, 90, 7):
        own = None
        if support is not None:
            ids = support.ids[support.offsets[row] : support.offsets[row + 1]]
            own = Support(ids, torch.tensor([0, len(ids)]))
        one = slice(row, row + 1)
        alone, _ = ExactOps().token_logprobs(hidden[one], head, targets[one], float(temperature[row]), own)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(100, 36, 52), (33, 64, 48), (7, 5, 3), (64, 300, 1000), (40, 1024, 64)]
)
def test_a_row_of_a_product_does_not_depend_on_the_others(rows, depth, columns, threads):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, depth, generator=generator) for n in (rows, columns))
    torch.set_num_threads(1)
    together = exact_plain.linear(x, weight, None)
    torch.set_num_threads(threads)
    torch.testing.assert_close(together.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    assert torch.equal(exact_plain.linear(x.flip(0), weight, None).flip(0), together)
    for row in range(rows):
        assert torch.equal(exact_plain.linear(x[row : row + 1], weight, None)[0], together[row])


ROWS_APART = """
import torch
from headrace.models import exact_plain

draw, unequal = torch.Generator().manual_seed(0), 0
for depth, columns in ((36, 52), (300, 1000), (1024, 64)):
    x, weight = (torch.randn(n, depth, generator=draw) for n in (100, columns))
    torch.set_num_threads(1)
    together = exact_plain.linear(x, weight, None)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        turned = exact_plain.linear(x.flip(0), weight, None).flip(0)
        alone = torch.cat([exact_plain.linear(row, weight, None) for row in x.split(1)])
        unequal += int((turned != together).sum() + (alone != together).sum())
print(unequal)
"""


@pytest.mark.parametrize("instructions", ["AVX2", "SSE4_2"])
def test_nor_where_the_library_computes_by_the_instructions_of_another_cpu(instructions):
    """MKL, where torch has it, is told at its first call which of the CPU's instructions there are."""
    environment = os.environ | {"MKL_ENABLE_INSTRUCTIONS": instructions}
    done = subprocess.run([sys.executable, "-c", ROWS_APART], env=environment, capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr


def test_a_library_whose_rows_always_depend_on_their_place_is_refused(monkeypatch):
    exact_plain.block_rows.cache_clear()
    monkeypatch.setattr(exact_plain, "_treats_rows_alike", lambda *_: False)
    with pytest.raises(HeadraceError, match=r"rows do not depend .*none of 32, 48, 24, 16.*; set eng"):
        exact_plain.linear(torch.ones(1, 16), torch.ones(16, 16), None)


@pytest.mark.parametrize("width", [1, 12, 64, 1000])
def test_sums_and_gates_of_a_row_do_not_depend_on_the_others(width, threads):
    generator = torch.Generator().manual_seed(0)
    x, other = 4 * torch.randn(2, 301, width, generator=generator)
    torch.set_num_threads(1)
    sums, gated = exact_plain.total(x), exact_plain.gated_silu(x, other)
    torch.set_num_threads(threads)
    torch.testing.assert_close(sums.double(), x.double().sum(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gated, nn.functional.silu(x) * other)
    for row in range(0, 301, 13):
        one = slice(row, row + 1)
        assert torch.equal(exact_plain.total(x[one]), sums[one])
        assert torch.equal(exact_plain.gated_silu(x[one], other[one]), gated[one])


# ── Values and gradients ─────────────────────────────────────────────────────────────────────────────────────


def scored(rows: int, truncated: bool) -> tuple[Tensor, Tensor, Tensor, Support | None]:
    """(hidden states, head, targets, a support that holds the target in all rows but every fourth)."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 20, generator=generator) for n in (rows, VOCAB))
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    if not truncated:
        return hidden, head, targets, None
    kept = [sorted({int(t), int(t) // 2, row % VOCAB}) if row % 4 else [] for row, t in enumerate(targets)]
    offsets = torch.tensor([0, *(len(ids) for ids in kept)]).cumsum(0)
    return hidden, head, targets, Support(torch.tensor([i for ids in kept for i in ids]), offsets)


def gradients(model: CausalLM, lengths: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    device = model.head_weight.device
    tokens, context = tokens_of(sum(lengths)).to(device), PackedContext(lengths, device)
    hidden = model(tokens, context.positions, context)
    temperature, weights = (torch.linspace(*ends, len(tokens), device=device) for ends in ((0.7, 1.3), (-1, 1)))
    logprobs, entropy = model.ops.token_logprobs(hidden, model.head_weight, tokens.roll(-1), temperature)
    (logprobs @ weights + 0.1 * entropy.sum()).backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_training(ops: ExactOps, family: str, lengths: list[int], device: str, **sizes: int) -> None:
    expected = gradients(model_of(family, ReferenceOps(), **sizes).to(device), lengths)
    found = gradients(model_of(family, ops, **sizes).to(device), lengths)
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-5)
    for name, gradient in expected[1].items():
        apart = (found[1][name] - gradient).norm() / gradient.norm()
        assert apart < (1e-5 if device == "cpu" else 1e-4), (name, float(apart))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_the_reference_s(family):
    assert_same_training(ExactOps(), family, LENGTHS, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_over_the_kernels_too(family):
    assert_same_training(ExactOps(kernels=True), family, [5, 1, 9], DEVICE, head_dim=16)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
def test_scores_and_their_gradients_are_the_reference_s(truncated, kernels):
    results, device = [], DEVICE if kernels else "cpu"
    for ops in (ReferenceOps(), ExactOps(kernels)):
        hidden, head, targets, support = scored(12, truncated)
        hidden, head = hidden.to(device).requires_grad_(), head.to(device).requires_grad_()
        if support is not None:
            support = Support(*(x.to(device) for x in support))
        logprobs, entropy = ops.token_logprobs(hidden, head, targets.to(device), 0.8, support, chunk_rows=5)
        (logprobs.square().sum() + entropy.sum()).backward()
        results.append((logprobs.detach(), entropy.detach(), hidden.grad, head.grad))
    for found, expected in zip(results[1], results[0], strict=True):
        # Each is a sum over the vocabulary or the rows of terms as large as the largest of them.
        apart = 2 * share(VOCAB) * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(found, expected, atol=apart, rtol=1e-5)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_target_outside_its_support_has_probability_zero_and_no_gradient(kernels):
    device = DEVICE if kernels else "cpu"
    hidden = torch.ones(1, 4, device=device, requires_grad=True)
    support = Support(torch.tensor([4], device=device), torch.tensor([0, 1], device=device))
    targets, head = torch.tensor([5], device=device), torch.ones(9, 4, device=device)
    logprobs, _ = ExactOps(kernels).token_logprobs(hidden, head, targets, 1.0, support)
    assert logprobs.item() < -1e29
    logprobs.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@torch.no_grad()
def test_the_kernels_give_a_sequence_in_pieces_the_same_bits(same_bits):
    model = model_of("qwen3", ExactOps(kernels=True), head_dim=16).to(DEVICE)
    tokens, context = tokens_of(30).to(DEVICE), PackedContext([27, 3], DEVICE)
    expected = model(tokens, context.positions, context)[:27]
    plain = packed_hidden(model_of("qwen3", ReferenceOps(), head_dim=16), tokens.cpu(), [27, 3])

    def shaken(draw: int) -> Tensor:
        return packed_hidden(model_of("qwen3", ShakenOps(draw), head_dim=16), tokens.cpu(), [27, 3])

    same_bits(hidden_in_pieces(model, tokens[:27], [23, 1, 3]), expected, shaken_apart(shaken, plain))


class ShakenOps(ReferenceOps):
    """Every projection and attention is off by as much as an order of summation can move it, up or down."""

    def __init__(self, seed: int):
        self._signs = torch.Generator().manual_seed(seed)

    def _moved(self, x: Tensor, apart: Tensor | float) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=self._signs) * 2 - 1
        return (x.double() + signs * apart).float()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._moved(super().linear(x, weight, bias), product_apart(x, weight, bias))

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        return [self.linear(x, layer.weight, layer.bias) for layer in layers]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        attended = super().attention(q, k, v, rotation, layer, context)
        turned = self.rope(self.rms_norm(q, rotation.q_norm, rotation.eps), q, rotation.cos, rotation.sin)[0]
        keys = self.rope(self.rms_norm(k, rotation.k_norm, rotation.eps), k, rotation.cos, rotation.sin)[0]
        return self._moved(attended, attention_apart(turned, keys, v, len(k)))


# ── Back end ─────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_layers_side_by_side_are_one_product_with_the_same_bits(monkeypatch, same_bits):
    layers = [nn.Linear(24, width, device=DEVICE) for width in (32, 16, 16)]
    x, ops = torch.randn(5, 24, device=DEVICE), ExactOps(kernels=True)
    apart = ops.linears(x, layers)
    for kind in ("weight", "bias"):
        for layer, joined in zip(layers, join([getattr(layer, kind) for layer in layers]), strict=True):
            setattr(layer, kind, nn.Parameter(joined, requires_grad=False))
    products = []
    plain = ops.linear
    monkeypatch.setattr(ops, "linear", lambda *given: products.append(given) or plain(*given))
    together = ops.linears(x, layers)
    assert len(products) == 1
    for one, other, layer in zip(together, apart, layers, strict=True):
        same_bits(one, other, product_apart(x, layer.weight, layer.bias))


def test_a_projection_that_is_not_plain_is_called():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    layers, x = [nn.Linear(8, 8), Doubled(8, 4)], torch.randn(3, 8)
    found = ExactOps().linears(x, layers)
    torch.testing.assert_close(found[0], layers[0](x))
    assert torch.equal(found[1], layers[1](x))


def test_attention_over_a_kept_cache_refuses_gradients():
    model = model_of("llama", ExactOps())
    with pytest.raises(RuntimeError, match="inference only"):
        model(tokens_of(3), torch.arange(3), CachedContext(2))


def test_a_temperature_of_zero_is_refused():
    hidden, head, targets, _ = scored(3, False)
    with pytest.raises(ValueError, match="temperature must be positive"):
        ExactOps().token_logprobs(hidden, head, targets, 0.0)
