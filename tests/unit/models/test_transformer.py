from __future__ import annotations

import copy

import pytest
import torch

from headrace.errors import ConfigError, InputError
from headrace.models.attention import CachedContext, PackedContext
from headrace.models.config import ModelConfig
from headrace.models.io import load_model, random_model
from headrace.models.ops import ReferenceOps
from headrace.models.rope_config import RopeConfig
from headrace.models.shapes import parameter_shapes
from headrace.models.transformer import CausalLM

FAMILIES = ["llama", "qwen2", "qwen3"]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 2.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 60,
        "factor": 4.0,
    },
}


def logits_of(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    context = PackedContext([len(tokens)])
    with torch.no_grad():
        return model.logits(model(tokens, context.positions, context))


def reference_logits(reference, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return reference(input_ids=tokens[None]).logits[0]


def assert_same_logits(reference, model, tokens):
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(model, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(saved_reference, tokens, family, tied, kv_heads):
    reference, folder = saved_reference(family, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    assert_same_logits(reference, load_model(folder), tokens(50))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_under_every_rope_scaling(saved_reference, tokens, family, rope):
    reference, folder = saved_reference(family, rope_parameters=ROPES[rope])
    assert_same_logits(reference, load_model(folder), tokens(60))


def test_rope_scalings_change_the_logits_so_that_the_comparison_means_something(saved_reference, tokens):
    seen = []
    for rope in ["default", "linear", "yarn", "yarn with mscale", "llama3", "longrope"]:
        _, folder = saved_reference("llama", rope_parameters=ROPES[rope])
        seen.append(logits_of(load_model(folder), tokens(60)))
    gaps = [(a - b).abs().max().item() for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_biases_are_applied(saved_reference, tokens, family):
    more = {"mlp_bias": True} if family == "llama" else {}
    reference, folder = saved_reference(family, attention_bias=True, **more)
    assert_same_logits(reference, load_model(folder), tokens(30))


def test_a_head_size_other_than_hidden_over_heads_is_followed(saved_reference, tokens):
    reference, folder = saved_reference("llama", head_dim=20)
    assert_same_logits(reference, load_model(folder), tokens(30))


@pytest.mark.parametrize(("rope", "limit"), [("dynamic", 64), ("longrope", 60)])
def test_a_rotation_that_depends_on_length_refuses_sequences_beyond_its_window(
    saved_reference, tokens, rope, limit
):
    _, folder = saved_reference("llama", rope_parameters=ROPES[rope])
    model = load_model(folder)
    assert model.config.max_sequence_length == limit
    logits_of(model, tokens(limit))
    with pytest.raises(InputError, match=f"longer than {limit} tokens") as caught:
        logits_of(model, tokens(limit + 1))
    assert caught.value.value == limit + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_equals_its_sequences_one_by_one(saved_reference, tokens, family):
    reference, folder = saved_reference(family)
    model = load_model(folder)
    lengths = [5, 1, 30, 17, 29, 5, 44]
    packed = tokens(sum(lengths))
    context = PackedContext(lengths)
    with torch.no_grad():
        found = model.logits(model(packed, context.positions, context))
    expected = torch.cat([reference_logits(reference, part) for part in packed.split(lengths)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_packed_batch_equal_those_of_transformers(saved_reference, tokens, family, tied):
    reference, folder = saved_reference(family, tie_word_embeddings=tied)
    model = load_model(folder)
    lengths = [6, 20, 3, 19]
    packed = tokens(sum(lengths))
    weights = torch.randn(len(packed), generator=torch.Generator().manual_seed(3))

    context = PackedContext(lengths)
    hidden = model(packed, context.positions, context)
    logprobs, _ = model.ops.token_logprobs(hidden, model.head_weight, packed)
    (weights * logprobs).sum().backward()

    for part, part_weights in zip(packed.split(lengths), weights.split(lengths), strict=True):
        logits = reference(input_ids=part[None]).logits[0]
        picked = logits.log_softmax(-1).gather(1, part[:, None])[:, 0]
        (part_weights * picked).sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert expected[name].grad.abs().max() > 1e-3, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("pieces", [[40], [1] * 12, [10, 1, 20, 9], [3, 37]])
def test_a_sequence_passed_in_pieces_equals_one_pass(saved_reference, tokens, pieces):
    reference, folder = saved_reference("qwen3")
    model = load_model(folder)
    sequence = tokens(sum(pieces))
    context = CachedContext(model.config.num_layers)
    found = []
    with torch.no_grad():
        for piece in sequence.split(pieces):
            positions = torch.arange(context.length, context.length + len(piece))
            found.append(model.logits(model(piece, positions, context)))
    assert context.length == len(sequence)
    torch.testing.assert_close(torch.cat(found), reference_logits(reference, sequence), atol=1e-4, rtol=0)


def test_pieces_replayed_under_changed_weights_see_the_keys_of_the_old_ones(reference, tokens):
    old_reference = reference("llama")
    new_reference = copy.deepcopy(old_reference)
    with torch.no_grad():
        for parameter in new_reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    sequence = tokens(24)
    with torch.no_grad():
        first = old_reference(input_ids=sequence[None, :15], use_cache=True)
        second = new_reference(input_ids=sequence[None, 15:], past_key_values=first.past_key_values)

    config = ModelConfig.from_hf(old_reference.config.to_dict())
    context, found = CachedContext(config.num_layers), []
    for source, piece in [(old_reference, sequence[:15]), (new_reference, sequence[15:])]:
        model = CausalLM(config)
        model.load_state_dict(source.state_dict())
        with torch.no_grad():
            positions = torch.arange(context.length, context.length + len(piece))
            found.append(model.logits(model(piece, positions, context)))
    torch.testing.assert_close(found[0], first.logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], second.logits[0], atol=1e-4, rtol=0)
    recomputed = reference_logits(new_reference, sequence)[15:]
    assert (found[1] - recomputed).abs().max() > 1e-2


def test_bfloat16_follows_transformers_rounding_for_rounding(saved_reference, tokens):
    reference, folder = saved_reference("qwen3")
    model = load_model(folder, dtype=torch.bfloat16)
    assert model.head_weight.dtype == torch.bfloat16
    exact = reference_logits(reference, tokens(40))
    rounded = reference_logits(reference.to(torch.bfloat16), tokens(40)).float()
    ours = logits_of(model, tokens(40)).float()
    assert (ours - exact).abs().mean() < 1.3 * (rounded - exact).abs().mean()


def test_casting_the_model_leaves_the_rotary_frequencies_in_float32():
    config = tiny_config()
    model = random_model(config, 0)
    positions = torch.arange(50)
    before = model.model.rotary.tables(positions, torch.float32)
    after = model.to(torch.bfloat16).model.rotary.tables(positions, torch.float32)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_have_exactly_the_names_and_shapes_of_transformers(reference, family, tied):
    theirs = reference(family, tie_word_embeddings=tied)
    config = ModelConfig.from_hf(theirs.config.to_dict())
    expected = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert parameter_shapes(config) == expected
    assert {name: tuple(t.shape) for name, t in CausalLM(config).state_dict().items()} == expected


def tiny_config(**changes) -> ModelConfig:
    sizes = {
        "family": "qwen2",
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "qkv_bias": True,
        "tie_embeddings": True,
        "initializer_range": 0.3,
        "rope": RopeConfig(theta=100.0),
    }
    return ModelConfig(**(sizes | changes))


def test_every_projection_goes_through_the_back_end_it_was_given(tokens):
    class CountingOps(ReferenceOps):
        calls = 0

        def linear(self, x, weight, bias):
            CountingOps.calls += 1
            return super().linear(x, weight, bias)

        def linears(self, x, layers):
            CountingOps.calls += len(layers)
            return super().linears(x, layers)

        def logits(self, hidden, head_weight):
            CountingOps.calls += 1
            return super().logits(hidden, head_weight)

    model = random_model(tiny_config(), 0, ops=CountingOps())
    logits_of(model, tokens(5) % 31)
    assert CountingOps.calls == 2 * 7 + 1


def test_a_lora_adapter_wraps_the_projections_and_changes_the_output(tokens):
    import peft

    model = random_model(tiny_config(), 0)
    sequence = tokens(9) % 31
    plain = logits_of(model, sequence)
    merged = copy.deepcopy(model)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    )
    torch.testing.assert_close(logits_of(model, sequence), plain)

    torch.manual_seed(1)
    adapters = {name: p for name, p in wrapped.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_(0, 0.3)
    for name, module in merged.named_modules():
        if name.rsplit(".", 1)[-1] in ("q_proj", "v_proj", "o_proj", "down_proj"):
            lora_a = adapters[f"base_model.model.{name}.lora_A.default.weight"]
            lora_b = adapters[f"base_model.model.{name}.lora_B.default.weight"]
            module.weight.data += 6 / 2 * lora_b.data @ lora_a.data
    adapted = logits_of(model, sequence)
    assert (adapted - plain).abs().max() > 0.1
    torch.testing.assert_close(adapted, logits_of(merged, sequence), atol=1e-4, rtol=0)

    context = PackedContext([9])
    hidden = wrapped(sequence, context.positions, context)
    model.ops.token_logprobs(hidden, model.head_weight, sequence)[0].sum().backward()
    assert {name for name, p in wrapped.named_parameters() if p.grad is not None} == set(adapters)


def test_an_adapter_on_the_output_head_is_refused_rather_than_ignored():
    import peft

    model = random_model(tiny_config(tie_embeddings=False), 0)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["lm_head"]), model)
    with pytest.raises(ConfigError, match="must not carry an adapter"):
        _ = model.head_weight
