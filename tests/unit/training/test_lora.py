"""LoRA in both back ends, against PEFT over `transformers`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from training_builders import TINY, mixed_batch, packed_of, random_adapter, random_batch, tiny_model

from headrace.errors import ConfigError, MissingExtra
from headrace.models import load_model
from headrace.training.adapter import adapter_spec, bound_modules
from headrace.training.backends.base import Backend, open_backend
from headrace.training.backends.native import NativeBackend
from headrace.training.backends.transformers import TransformersBackend
from headrace.training.config import LoraConfig, TrainingConfig

KINDS = [NativeBackend, TransformersBackend]
LORA = LoraConfig(rank=4, alpha=6.0)
PREFIX = "base_model.model."


def plain_peft(folder: Path, tensors: dict[str, torch.Tensor], lora: LoraConfig = LORA) -> Any:
    """PEFT over transformers with the given adapter, by PEFT's own ways."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    wrapped = peft.get_peft_model(model, config)
    result = peft.set_peft_model_state_dict(wrapped, dict(tensors))
    assert not result.unexpected_keys
    return wrapped


def put(backend: Backend, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            backend.parameters()[name].copy_(tensor)


def adapter_of(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def base_of(backend: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in backend._model.named_parameters() if "lora_" not in name}


def logprobs_one_by_one(model: Any, batch: Any) -> torch.Tensor:
    parts = []
    for one in batch.episodes:
        (only,) = one.turns
        ids = torch.tensor(np.concatenate([only.context, only.tokens])).long()
        logp = model(ids[None]).logits[0].log_softmax(-1)
        parts.append(logp[len(only.context) - 1 : -1].gather(1, ids[len(only.context) :, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_log_probs_and_gradients_are_those_of_peft_over_transformers(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family, tie_word_embeddings=family == "qwen3", initializer_range=0.1)
    batch, tensors = random_batch(1), random_adapter(folder, LORA)
    model = plain_peft(folder, tensors)
    expected = logprobs_one_by_one(model, batch)
    slopes = torch.linspace(-1, 1, len(expected)) / len(expected)
    (expected * slopes).sum().backward()
    gradients = {name: p.grad for name, p in adapter_of(model).items()}
    for kind in KINDS:
        backend = kind(folder, lora=LORA)
        own = backend.parameters()
        assert own.keys() == tensors.keys() == gradients.keys()
        put(backend, tensors)
        logprobs, _ = backend.token_logprobs(packed_of(batch))
        np.testing.assert_allclose(logprobs.detach(), expected.detach(), atol=1e-5)
        (logprobs * slopes).sum().backward()
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 1e-4, name
            np.testing.assert_allclose(own[name].grad, gradient, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_is_pefts_own_of_the_seed_and_changes_nothing_yet(tmp_path: Path, kind: type) -> None:
    folder = tiny_model(tmp_path)
    before = torch.get_rng_state()
    backend = kind(folder, lora=LORA, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(7)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(LORA.targets))
    drawn = adapter_of(peft.get_peft_model(model, config))
    assert backend.parameters().keys() == drawn.keys()
    for name, parameter in backend.parameters().items():
        assert torch.equal(parameter, drawn[name]), name
        assert parameter.any() == (".lora_A." in name), name
    other = kind(folder, lora=LORA, seed=8).parameters()
    assert not torch.equal(next(iter(other.values())), next(iter(drawn.values())))
    packed = packed_of(mixed_batch())
    assert torch.equal(backend.token_logprobs(packed)[0], kind(folder).token_logprobs(packed)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_the_names_and_shapes_of_an_adapter_file(tmp_path: Path, kind: type) -> None:
    lora = LoraConfig(rank=3, targets=("q_proj", "mlp.down_proj"))
    shapes = {name: tuple(p.shape) for name, p in kind(tiny_model(tmp_path), lora=lora).parameters().items()}
    expected: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        for module, rows, columns in (("self_attn.q_proj", 32, 32), ("mlp.down_proj", 32, 48)):
            name = f"{PREFIX}model.layers.{layer}.{module}"
            expected |= {f"{name}.lora_A.weight": (3, columns), f"{name}.lora_B.weight": (rows, 3)}
    assert shapes == expected


@pytest.mark.parametrize("kind", KINDS)
def test_all_seven_projections_of_every_layer_are_trained_and_nothing_else(tmp_path: Path, kind: type) -> None:
    backend = kind(tiny_model(tmp_path, "qwen3"), lora=LORA)
    sizes = ((32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48))
    trained = [p for p in backend._model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 2 * sum(4 * (rows + columns) for rows, columns in sizes)
    assert {id(p) for p in trained} == {id(p) for p in backend.parameters().values()}
    assert len(backend.parameters()) == 2 * 2 * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_back_end_has_the_model_once_in_bfloat16(tmp_path: Path, kind: type) -> None:
    folder = tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)
    backend = kind(folder, dtype=torch.bfloat16, lora=LORA)
    base = base_of(backend)
    stored = load_file(folder / "model.safetensors")
    assert len(base) == len(stored)
    for name, tensor in base.items():
        expected = stored[name.replace(".base_layer.", ".")].bfloat16()
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected), name
    assert {p.dtype for p in backend.parameters().values()} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_pass_rounds_as_an_engine_that_serves_the_adapter_does(tmp_path: Path, kind: type) -> None:
    """Every product's result is bfloat16: W x, A x, B (A x), its multiple and the sum."""
    folder = tiny_model(tmp_path)
    backend, tensors = kind(folder, dtype=torch.bfloat16, lora=LORA), random_adapter(folder, LORA)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    name = "model.layers.1.mlp.down_proj"
    layer = backend._model.get_submodule(name)
    layer.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    put(backend, tensors)
    logprobs, _ = backend.token_logprobs(packed_of(mixed_batch()))
    x, y = seen[0]
    a, b = (tensors[f"{PREFIX}{name}.lora_{part}.weight"].bfloat16() for part in "AB")
    weight = load_file(folder / "model.safetensors")[f"{name}.weight"].bfloat16()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, x @ weight.T + (x @ a.T @ b.T) * (6 / 4))
    logprobs.sum().backward()
    for key, parameter in backend.parameters().items():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.any(), key


def test_both_back_ends_agree_in_bfloat16(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3", initializer_range=0.05)
    packed, tensors, found = packed_of(mixed_batch()), random_adapter(folder, LORA), []
    for kind in KINDS:
        backend = kind(folder, dtype=torch.bfloat16, lora=LORA)
        put(backend, tensors)
        found.append(backend.token_logprobs(packed)[0].detach())
    np.testing.assert_allclose(found[0], found[1], atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_does_to_packed_sequences_and_logits_is_seen_in_either_type(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """A soft cap of 30 moves these logits by less than bfloat16 rounds them."""
    torch.manual_seed(0)
    lora = LoraConfig(rank=2, targets=("q_proj",))
    for name, config in {
        "llama": transformers.LlamaConfig(**TINY),
        "gemma2": transformers.Gemma2Config(**TINY, final_logit_softcapping=30.0, query_pre_attn_scalar=8),
    }.items():
        config.pad_token_id = None
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        backend = TransformersBackend(tmp_path / name, dtype=dtype, lora=lora)
        assert backend.keeps_sequences_apart
        assert backend._head_is_plain == (name == "llama")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_targets_that_bind_to_nothing_or_to_head_or_embedding_are_refused(
    tmp_path: Path, kind: type, tied: bool
) -> None:
    folder = tiny_model(tmp_path, tie_word_embeddings=tied)
    for target, words in (
        ("qkv_proj", "would bind to nothing"),
        ("proj", "would bind to nothing"),
        ("lm_head", "output head"),
        ("embed_tokens", "embedding"),
        ("self_attn", "no projections"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            kind(folder, lora=LoraConfig(targets=("q_proj", target)))
        assert target in str(caught.value.value)
        assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in (caught.value.remedy or "")


def test_a_target_means_modules_by_the_last_parts_of_their_names() -> None:
    modules = ["model.layers.0.a.q_proj", "model.layers.1.a.q_proj", "model.layers.0.b.up"]
    assert bound_modules(("up", "0.a.q_proj"), modules, ()) == [modules[0], modules[2]]
    assert bound_modules(("q_proj", "a.q_proj"), modules, ()) == modules[:2]
    with pytest.raises(ConfigError, match="nothing"):
        bound_modules(("_proj",), modules, ())


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"pip install 'headrace\[lora\]'"):
        NativeBackend(tiny_model(tmp_path), lora=LORA)


def test_the_configuration_opens_a_back_end_with_its_adapter(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    drawn: list[Backend] = []
    for name in ("native", "transformers"):
        config = TrainingConfig(backend=name, device="cpu", lora=LORA)  # type: ignore[arg-type]
        drawn.append(open_backend(folder, config, seed=3))
    assert [type(one) for one in drawn] == KINDS
    for name, parameter in NativeBackend(folder, lora=LORA, seed=3).parameters().items():
        assert all(torch.equal(one.parameters()[name], parameter) for one in drawn), name


def test_exact_numerics_and_an_adapter_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"training\.lora"):
        TrainingConfig(numerics="exact", lora=LORA).check()
    with pytest.raises(ConfigError, match=r"training\.lora\.targets names at least one"):
        LoraConfig(targets=()).check()


def test_an_adapter_is_described_as_plain_data() -> None:
    spec = adapter_spec(LoraConfig(rank=8, alpha=4.5, targets=("q_proj",)))
    assert (spec.name, spec.rank, spec.alpha, spec.targets) == ("policy", 8, 4.5, ("q_proj",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_folder_has_merged_float32_weights_and_the_adapter_beside_them(
    tmp_path: Path, kind: type, dtype: torch.dtype
) -> None:
    folder = tiny_model(tmp_path / "model", "qwen2", tie_word_embeddings=True)
    (folder / "tokenizer.json").write_text("{}")
    backend, tensors = kind(folder, dtype=dtype, lora=LORA), random_adapter(folder, LORA)
    put(backend, tensors)
    backend.save_hf(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "float32"
    merged, base = load_file(tmp_path / "saved/model.safetensors"), load_file(folder / "model.safetensors")
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        expected = tensor.to(dtype).double()
        key = PREFIX + name.removesuffix("weight")
        if f"{key}lora_A.weight" in tensors:
            expected += 6 / 4 * tensors[f"{key}lora_B.weight"].double() @ tensors[f"{key}lora_A.weight"].double()
        assert merged[name].dtype == torch.float32
        np.testing.assert_allclose(merged[name], expected, atol=1e-6, err_msg=name)
    stored = load_file(tmp_path / "saved/adapter/adapter_model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_loads_in_peft_with_the_back_ends_logits(tmp_path: Path, kind: type) -> None:
    folder = tiny_model(tmp_path / "model", "qwen3", initializer_range=0.1)
    batch, tensors = random_batch(2), random_adapter(folder, LORA)
    backend = kind(folder, lora=LORA)
    put(backend, tensors)
    backend.save_hf(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        unadapted = plain(torch.arange(9)[None]).logits
        own = backend.token_logprobs(packed_of(batch))[0]
        adapted = peft.PeftModel.from_pretrained(plain, str(tmp_path / "saved/adapter"))
        by_peft = logprobs_one_by_one(adapted, batch)
        logits = adapted(torch.arange(9)[None]).logits
        reference = plain_peft(folder, tensors)(torch.arange(9)[None]).logits
    assert torch.equal(logits, reference)
    assert (logits - unadapted).abs().max() > 0.1
    np.testing.assert_allclose(own, by_peft, atol=1e-5)
    config = json.loads((tmp_path / "saved/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6, "LORA")
    assert config["target_modules"] == sorted(LORA.targets)
    assert config["base_model_name_or_path"] == str(folder)
    merged = load_model(tmp_path / "saved")
    again = NativeBackend(tmp_path / "saved")
    assert merged.head_weight.dtype == torch.float32
    with torch.no_grad():
        np.testing.assert_allclose(again.token_logprobs(packed_of(batch))[0], own, atol=1e-5)
