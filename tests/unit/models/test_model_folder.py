from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import ModelFolderError
from headrace.models.config import ModelConfig
from headrace.models.folder import check_folder


@pytest.fixture
def folder(saved_reference):
    """A sound folder of three shards or more, for each test to damage."""
    _, path = saved_reference("qwen2", max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) >= 3
    return path


@pytest.fixture
def single(saved_reference):
    return saved_reference("llama")[1]


def refusal(path) -> ModelFolderError:
    with pytest.raises(ModelFolderError) as caught:
        check_folder(path)
    assert caught.value.remedy
    return caught.value


def edit_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_sound_folder_gives_its_configuration_well_within_half_a_second(folder):
    # Work, not waiting: others may be busy on this machine.
    started = time.thread_time()
    config = check_folder(str(folder))
    assert time.thread_time() - started < 0.2
    assert config == ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    assert (config.family, config.num_layers, config.num_kv_heads) == ("qwen2", 2, 2)


def test_a_missing_folder_is_named(tmp_path):
    error = refusal(tmp_path / "nowhere")
    assert error.rule == "a model folder must exist"
    assert error.value == str(tmp_path / "nowhere")


def test_a_name_on_the_hub_is_told_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("Qwen/Qwen3-0.6B")).remedy == (
        "for the model of that name on the hub: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, and name "
        "that folder"
    )


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("model-Q4.gguf", "GGUF files are for other programs"),
        ("adapter_config.json", "this is an adapter"),
    ],
)
def test_a_folder_of_another_kind_is_told_what_it_is(tmp_path, name, begins):
    (tmp_path / name).write_bytes(b"{}")
    assert refusal(tmp_path).remedy.startswith(begins)


def test_a_pointer_of_git_lfs_is_told_from_weights(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    error = refusal(single)
    assert error.rule == "model.safetensors must hold the weights; it is a pointer of Git LFS to them"
    assert error.remedy.startswith("run `git lfs pull`")


def test_a_file_in_place_of_a_folder_is_refused(single):
    assert refusal(single / "config.json").rule == "a model must be a folder, not a file"


def test_an_empty_folder_is_refused(tmp_path):
    assert refusal(tmp_path).rule == "a model folder must not be empty"


def test_a_folder_without_config_is_refused(single):
    (single / "config.json").unlink()
    assert refusal(single).rule == "a model folder must hold a config.json"


@pytest.mark.parametrize(
    ("content", "rule"),
    [('{"model_type": ', "valid JSON"), ("", "valid JSON"), ("\xff\xfe", "UTF-8 text")],
)
def test_a_malformed_config_is_refused(single, content, rule):
    (single / "config.json").write_bytes(content.encode("latin-1"))
    assert refusal(single).rule == f"config.json must be {rule}"


def test_a_config_that_is_no_object_is_refused(single):
    (single / "config.json").write_text("[1, 2]")
    error = refusal(single)
    assert error.rule == "config.json must hold a JSON object"
    assert error.value == [1, 2]


def test_an_unknown_architecture_is_refused_with_the_known_ones(single):
    edit_config(single, model_type="mamba")
    error = refusal(single)
    assert error.value == "mamba"
    assert error.remedy == (
        "a run's policy is one of: llama, qwen2, qwen3: no engine samples others; another causal model can be "
        'trained (training.backend = "transformers") in a loop of your own'
    )
    edit_config(single, model_type="bert", architectures=["BertForMaskedLM"])
    assert refusal(single).remedy == (
        "a run's policy is one of: llama, qwen2, qwen3; BertForMaskedLM is no causal language model at all"
    )


def test_a_folder_without_weights_is_refused(single):
    (single / "model.safetensors").unlink()
    error = refusal(single)
    assert error.rule == "a model folder must hold model.safetensors or model.safetensors.index.json"
    assert error.value == ["config.json", "generation_config.json"]


def test_pickled_weights_are_refused_with_how_to_convert_them(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    error = refusal(single)
    assert error.value == ["pytorch_model.bin"]
    assert "convert" in error.remedy


def test_a_missing_shard_is_named(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    error = refusal(folder)
    assert error.rule == "every shard that model.safetensors.index.json names must be there"
    assert error.value == [shard.name]


def test_an_index_without_a_map_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    assert refusal(folder).rule == "model.safetensors.index.json must map each tensor to its file"


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_file_is_refused_with_both_sizes(single, kept):
    file = single / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    error = refusal(single)
    assert error.rule.startswith("model.safetensors is truncated")
    assert error.value == f"{len(whole[:kept])} bytes"
    if kept == -1:
        assert f"{len(whole)} bytes" in error.rule


def test_a_file_with_bytes_to_spare_is_refused(single):
    with (single / "model.safetensors").open("ab") as stream:
        stream.write(b"x")
    assert "longer than its header says" in refusal(single).rule


def test_a_file_that_is_not_safetensors_is_refused(single):
    (single / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"not a header at all")
    assert refusal(single).rule == "the safetensors header of model.safetensors must be valid JSON"


def test_a_missing_tensor_is_named(single):
    edit_tensors(single, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    error = refusal(single)
    assert error.rule == "the weights must hold every tensor of the configuration"
    assert error.value == ["model.layers.1.mlp.up_proj.weight"]


def test_a_missing_head_is_answered_with_the_key_that_ties_it(single):
    edit_tensors(single, lambda tensors: tensors.pop("lm_head.weight"))
    error = refusal(single)
    assert error.value == "lm_head.weight"
    assert "tie_word_embeddings" in error.remedy


def test_an_unexpected_tensor_is_named(single):
    edit_tensors(single, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    error = refusal(single)
    assert error.rule == "the weights must hold only tensors of the configuration"
    assert error.value == ["model.extra.weight"]


def test_many_missing_tensors_are_counted_not_listed(single):
    edit_config(single, num_hidden_layers=4)
    assert refusal(single).value[-1] == "… and 15 more"


def test_a_wrong_shape_is_told_beside_the_right_one(single):
    edit_config(single, intermediate_size=40)
    error = refusal(single)
    assert error.rule == "model.layers.0.mlp.gate_proj.weight must have the shape (40, 32)"
    assert error.value == (48, 32)


def test_weights_that_are_not_floating_point_are_refused(single):
    edit_tensors(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    error = refusal(single)
    assert error.rule.startswith("model.norm.weight must be one of")
    assert error.value == "I8"


def test_stored_rotary_frequencies_of_old_checkpoints_are_ignored(single):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(single, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert check_folder(single).family == "llama"


def test_the_folder_is_left_as_it_was(single, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(single, copy)
    check_folder(single)
    assert {f.name: f.read_bytes() for f in single.iterdir()} == {f.name: f.read_bytes() for f in copy.iterdir()}
