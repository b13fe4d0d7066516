from __future__ import annotations

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.errors import ModelFolderError
from headrace.models.attention import PackedContext
from headrace.models.config import ModelConfig
from headrace.models.folder import check_folder
from headrace.models.io import load_model, random_model, save_model
from headrace.models.shapes import parameter_count


def config_of(family: str, **changes) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": family,
            "vocab_size": 67,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "initializer_range": 0.2,
            **changes,
        }
    )


def logits_of(model, tokens):
    context = PackedContext([len(tokens)])
    with torch.no_grad():
        return model.logits(model(tokens, context.positions, context))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_saved_folder_loads_in_transformers_with_equal_logits(tmp_path, tokens, family, tied, max_shard_bytes):
    config = config_of(family, tie_word_embeddings=tied)
    model = random_model(config, seed=3)
    save_model(model, config, tmp_path, max_shard_bytes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(input_ids=tokens(40)[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits_of(model, tokens(40)), expected, atol=1e-4, rtol=0)


def test_shards_stay_within_their_size_and_the_index_names_every_tensor(tmp_path):
    config = config_of("llama")
    model = random_model(config, seed=0)
    save_model(model, config, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [s.name for s in shards] == [
        f"model-0000{i + 1}-of-0000{len(shards)}.safetensors" for i in range(len(shards))
    ]
    for shard in shards:
        assert sum(t.nbytes for t in load_file(shard).values()) <= 20_000
    assert set(index["weight_map"]) == set(model.state_dict())
    assert index["metadata"]["total_size"] == 4 * parameter_count(config)


def test_sharded_folders_of_transformers_are_read(saved_reference):
    reference, folder = saved_reference("qwen3", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = load_model(folder)
    expected = reference.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_what_was_saved_is_loaded_bit_for_bit_in_its_dtype(tmp_path):
    config = config_of("qwen3", tie_word_embeddings=True)
    model = random_model(config, seed=1, dtype=torch.bfloat16)
    save_model(model.state_dict(), config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_model(tmp_path, dtype=torch.bfloat16)
    assert loaded.config == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_loaded_weights_do_not_depend_on_the_file_any_more(tmp_path):
    config = config_of("llama")
    save_model(random_model(config, seed=1), config, tmp_path)
    model = load_model(tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_saving_again_leaves_nothing_of_the_earlier_save(tmp_path):
    config = config_of("llama")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_model(random_model(config, seed=1), config, tmp_path, max_shard_bytes=20_000)
    second = random_model(config, seed=2)
    save_model(second, config, tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert torch.equal(load_model(tmp_path).head_weight, second.head_weight)


def test_a_state_that_is_not_the_configurations_is_refused_before_anything_is_written(tmp_path):
    state = random_model(config_of("llama"), seed=1).state_dict()
    state["model.layers.0.mlp.up_proj.lora_A"] = torch.zeros(2, 2)
    with pytest.raises(ModelFolderError, match=r"up_proj\.lora_A"):
        save_model(state, config_of("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tied_model_with_a_stored_head_loads_only_when_the_head_is_the_embedding(tmp_path):
    config = config_of("llama", tie_word_embeddings=True)
    save_model(random_model(config, seed=1), config, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert check_folder(tmp_path) == config
    assert torch.equal(load_model(tmp_path).head_weight, tensors["lm_head.weight"])
    tensors["lm_head.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(ModelFolderError, match="head must equal its embedding"):
        load_model(tmp_path)


def test_a_random_model_is_drawn_like_transformers_and_repeats_with_its_seed():
    config = config_of("qwen2", initializer_range=0.05, vocab_size=2000)
    state = random_model(config, seed=5).state_dict()
    assert math.isclose(state["model.embed_tokens.weight"].std().item(), 0.05, rel_tol=0.02)
    assert abs(state["model.embed_tokens.weight"].mean().item()) < 1e-3
    assert torch.equal(state["model.norm.weight"], torch.ones(32))
    assert torch.equal(state["model.layers.0.self_attn.q_proj.bias"], torch.zeros(32))
    again = random_model(config, seed=5).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
    other = random_model(config, seed=6).state_dict()
    assert not torch.equal(other["model.embed_tokens.weight"], state["model.embed_tokens.weight"])


def test_loaded_parameters_can_be_trained(tmp_path):
    config = config_of("llama")
    save_model(random_model(config, seed=1), config, tmp_path)
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in load_model(tmp_path).parameters())
