"""Packed log-probs against `transformers`, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from training_builders import TINY, batch_of, episode, ints, mixed_batch, packed_of, tiny_model, turn

from headrace.errors import ModelFolderError
from headrace.models import joined_names, side_by_side
from headrace.records import Batch
from headrace.training.backends.base import Backend
from headrace.training.backends.native import NativeBackend
from headrace.training.backends.transformers import TransformersBackend
from headrace.training.config import LoraConfig

VOCAB = 32
FOREIGN: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_without("head_dim", "num_key_value_heads")),
    "gemma2": lambda: transformers.Gemma2Config(**TINY, final_logit_softcapping=3.0, query_pre_attn_scalar=8),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
}


def _without(*names: str) -> dict[str, object]:
    return {name: value for name, value in TINY.items() if name not in names}


def foreign_model(folder: Path, name: str) -> Path:
    torch.manual_seed(0)
    config = FOREIGN[name]()
    config.pad_token_id = None
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def reference_logprobs(folder: Path, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, entropies) of single-turn episodes, float64 softmax over each turn's support."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs, entropies = [], []
    for one in batch.episodes:
        (only,) = one.turns
        ids = np.concatenate([only.context, only.tokens])
        with torch.no_grad():
            logits = model(torch.tensor(ids)[None].long()).logits[0].double().numpy()
        for t, token in enumerate(only.tokens):
            scores = logits[len(only.context) + t - 1] / (only.sampling.temperature or 1.0)
            allowed = np.arange(VOCAB) if only.support is None else only.support.row(t)
            weights = np.exp(scores[allowed] - scores[allowed].max())
            weights /= weights.sum()
            logprobs.append(np.log(weights[list(allowed).index(token)]))
            entropies.append(-(weights * np.log(weights)).sum())
    return np.array(logprobs), np.array(entropies)


def compare(backend: Backend, folder: Path, batch: Batch, tolerance: float = 2e-5) -> None:
    expected, entropies = reference_logprobs(folder, batch)
    logprobs, entropy = backend.token_logprobs(packed_of(batch))
    assert logprobs.dtype == entropy.dtype == torch.float32
    np.testing.assert_allclose(logprobs.detach(), expected, atol=tolerance)
    np.testing.assert_allclose(entropy.detach(), entropies, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_native_log_probs_of_a_packed_batch_equal_those_of_transformers_one_by_one(
    tmp_path: Path, family: str
) -> None:
    compare(NativeBackend(tiny_model(tmp_path, family)), tmp_path, mixed_batch())


@pytest.mark.parametrize("layout", ["packed", "rows"])
@pytest.mark.parametrize("name", list(FOREIGN))
def test_transformers_log_probs_of_a_packed_batch_equal_those_one_by_one(
    tmp_path: Path, name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TransformersBackend(foreign_model(tmp_path, name))
    assert backend.keeps_sequences_apart == (name != "bloom")
    if layout == "packed":
        monkeypatch.setattr(backend, "_cost", lambda tokens, pairs: -pairs)
    else:
        backend.keeps_sequences_apart = False
    passes = backend._plan(packed_of(mixed_batch()))
    assert (len(passes) == 1) == (layout == "packed" and name != "bloom")
    compare(backend, tmp_path, mixed_batch(), 1e-4 if name == "bloom" else 2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "gemma2"])
def test_two_packed_sequences_do_not_see_each_other(tmp_path: Path, name: str) -> None:
    backend = TransformersBackend(foreign_model(tmp_path, name))
    assert backend.keeps_sequences_apart
    results = []
    for neighbour in (ints(1, 2, 3, 4), ints(9, 8, 7, 6)):
        pair = [episode(turn(neighbour, ints(5))), episode(turn(ints(10, 11), ints(12, 13)))]
        packed = packed_of(batch_of(pair, [1.0, 1.0]))
        assert len(backend._plan(packed)) == 1
        results.append(backend.token_logprobs(packed)[0].detach())
    assert not torch.equal(results[0][:1], results[1][:1])
    assert torch.equal(results[0][1:], results[1][1:])


def test_a_model_that_would_mix_packed_sequences_gets_one_row_each(tmp_path: Path) -> None:
    backend = TransformersBackend(foreign_model(tmp_path, "bloom"))
    assert not backend.keeps_sequences_apart


def test_the_logits_own_scaling_is_kept(tmp_path: Path) -> None:
    assert TransformersBackend(foreign_model(tmp_path / "a", "llama"))._head_is_plain
    assert not TransformersBackend(foreign_model(tmp_path / "b", "gemma2"))._head_is_plain


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_back_ends_give_the_same_gradients(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family, tie_word_embeddings=family == "qwen3")
    packed = packed_of(mixed_batch())
    gradients = []
    for backend in (NativeBackend(folder), TransformersBackend(folder)):
        logprobs, _ = backend.token_logprobs(packed)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients.append({name: p.grad for name, p in backend.parameters().items()})
    assert gradients[0].keys() == gradients[1].keys()
    assert ("lm_head.weight" in gradients[0]) == (family == "llama")
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradient, gradients[1][name], atol=2e-4, err_msg=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [NativeBackend, TransformersBackend])
def test_bfloat16_passes_are_near_float32_and_leave_float32_gradients(tmp_path: Path, kind: type) -> None:
    folder = tiny_model(tmp_path, "qwen3", tie_word_embeddings=True, initializer_range=0.05)
    packed = packed_of(mixed_batch())
    exact, _ = kind(folder).token_logprobs(packed)
    backend = kind(folder, dtype=torch.bfloat16)
    rounded, _ = backend.token_logprobs(packed)
    assert not torch.equal(exact, rounded)
    np.testing.assert_allclose(rounded.detach(), exact.detach(), atol=0.05)
    rounded.sum().backward()
    for name, parameter in backend.parameters().items():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_weights_of_one_input_lie_side_by_side_in_bfloat16_and_are_saved_apart(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path / "model", family)
    backend = NativeBackend(folder, dtype=torch.bfloat16)
    for names in joined_names(backend._model.config):
        own = [backend._model.get_parameter(name) for name in names]
        together = side_by_side(own)
        assert together is not None
        assert torch.equal(together, torch.cat([backend.parameters()[name].bfloat16() for name in names]))
    backend.save_hf(tmp_path / "saved")
    again = NativeBackend(tmp_path / "saved").parameters()
    assert all(torch.equal(again[name], p) for name, p in NativeBackend(folder).parameters().items())


@pytest.mark.parametrize("kind", [NativeBackend, TransformersBackend])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_bfloat16_passes_follow_every_change_of_the_parameters_and_add_their_gradients(
    tmp_path: Path, kind: type, lora: LoraConfig | None
) -> None:
    folder = tiny_model(tmp_path, "qwen3", tie_word_embeddings=True, initializer_range=0.05)
    packed = packed_of(mixed_batch())
    backend, fresh = (kind(folder, dtype=torch.bfloat16, lora=lora) for _ in range(2))
    before, _ = backend.token_logprobs(packed)
    (2 * before).sum().backward()
    with torch.no_grad():
        for one in (backend, fresh):
            for index, parameter in enumerate(one.parameters().values()):
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    first = {name: p.grad.clone() for name, p in backend.parameters().items()}
    after, _ = backend.token_logprobs(packed)
    expected, _ = fresh.token_logprobs(packed)
    assert not torch.equal(before, after)
    assert torch.equal(after, expected)
    after.sum().backward()
    expected.sum().backward()
    for name, parameter in backend.parameters().items():
        assert torch.equal(parameter.grad, first[name] + fresh.parameters()[name].grad), name


@pytest.mark.parametrize("kind", [NativeBackend, TransformersBackend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_is_the_trained_one_with_its_tokenizer(
    tmp_path: Path, kind: type, dtype: torch.dtype
) -> None:
    folder = tiny_model(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    (folder / "tokenizer.json").write_text("{}")
    backend = kind(folder, dtype=dtype)
    with torch.no_grad():
        for parameter in backend.parameters().values():
            parameter.mul_(1.5)
    backend.save_hf(tmp_path / "saved")
    assert (tmp_path / "saved/tokenizer.json").read_text() == "{}"
    again = NativeBackend(tmp_path / "saved")
    for name, parameter in backend.parameters().items():
        assert torch.equal(parameter, again.parameters()[name]), name
    packed = packed_of(mixed_batch())
    now, saved = (one.token_logprobs(packed)[0] for one in (backend, kind(tmp_path / "saved", dtype=dtype)))
    assert torch.equal(now, saved)


def test_a_folder_transformers_cannot_load_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=str(tmp_path)):
        TransformersBackend(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_activations_computed_again_give_the_very_gradients(tmp_path: Path, dtype: torch.dtype, lora) -> None:
    folder, packed = tiny_model(tmp_path, "qwen3"), packed_of(mixed_batch())
    found, kept = [], []
    for recompute in (False, True):
        backend = NativeBackend(folder, dtype=dtype, lora=lora, recompute=recompute)
        kept.append(0)

        def count(tensor: torch.Tensor) -> torch.Tensor:
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            logprobs, entropy = backend.token_logprobs(packed)
        (logprobs.sum() + entropy.sum()).backward()
        found.append({name: p.grad for name, p in backend.parameters().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert any(gradient.abs().max() > 0 for gradient in found[1].values())
    assert kept[1] < 0.5 * kept[0]
