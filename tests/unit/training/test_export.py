"""The type of exported weights, as the files themselves say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from training_builders import tiny_model

from headrace.errors import ModelFolderError
from headrace.models import ModelConfig, load_model, random_model, save_model, stored_dtype
from headrace.training.config import LoraConfig, TrainingConfig
from headrace.training.trainer import LocalTrainer

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def model_in(folder: Path, dtype: torch.dtype, **changes: object) -> Path:
    made = tiny_model(folder / "float32", "qwen3", **changes)
    config = ModelConfig.from_hf(json.loads((made / "config.json").read_text()))
    save_model(load_model(made), config, folder / "model", dtype=dtype)
    return folder / "model"


def types(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as tensors:
        return {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("began", "chosen", "expected"),
    [
        (torch.bfloat16, "model", torch.bfloat16),
        (torch.float16, "model", torch.float16),
        (torch.float32, "model", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_weights_are_exported_in_the_type_that_was_chosen(
    tmp_path: Path,
    backend: str,
    lora: LoraConfig | None,
    began: torch.dtype,
    chosen: str,
    expected: torch.dtype,
) -> None:
    folder = model_in(tmp_path, began, tie_word_embeddings=True)
    config = TrainingConfig(device="cpu", backend=backend, lora=lora, export_dtype=chosen)  # type: ignore[arg-type]
    owner = LocalTrainer(config, model=folder)
    for tensor in owner.tensors().values():
        tensor.add_(0.001)
    kept = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    owner.export(tmp_path / "out")
    assert types(tmp_path / "out/model.safetensors") == {NAMES[expected]}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    if lora is None:
        exported = dict(load_model(tmp_path / "out").named_parameters())
        assert all(torch.equal(exported[name], tensor.to(expected).float()) for name, tensor in kept.items())
    else:
        assert types(tmp_path / "out/adapter/adapter_model.safetensors") == {NAMES[expected]}
    # What is trained stays as exact as it was.
    assert all(torch.equal(tensor, kept[name]) for name, tensor in owner.tensors().items())
    assert {tensor.dtype for tensor in owner.tensors().values()} == {torch.float32}
    owner.save(tmp_path / "checkpoint", {})
    assert types(tmp_path / "checkpoint/weights.safetensors") == {"F32"}


def test_a_merged_adapter_is_rounded_once(tmp_path: Path) -> None:
    folder = model_in(tmp_path, torch.bfloat16)
    lora = LoraConfig(rank=2)
    exports = []
    for chosen in ("float32", "model"):
        owner = LocalTrainer(TrainingConfig(device="cpu", lora=lora, export_dtype=chosen), model=folder)  # type: ignore[arg-type]
        for tensor in owner.tensors().values():
            tensor.add_(0.01)
        owner.export(tmp_path / chosen)
        exports.append(dict(load_model(tmp_path / chosen).named_parameters()))
    whole, rounded = exports
    assert any(not torch.equal(tensor, rounded[name]) for name, tensor in whole.items())
    assert all(torch.equal(tensor.bfloat16().float(), rounded[name]) for name, tensor in whole.items())


def test_shards_are_cut_by_the_size_they_have_when_written(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(json.loads((tiny_model(tmp_path / "a") / "config.json").read_text()))
    model = random_model(config, 0)
    save_model(model, config, tmp_path / "whole", max_shard_bytes=20_000)
    save_model(model, config, tmp_path / "half", max_shard_bytes=10_000, dtype=torch.bfloat16)
    ends = [sorted(file.name for file in (tmp_path / name).glob("*.safetensors")) for name in ("whole", "half")]
    assert ends[0] == ends[1]
    assert len(ends[0]) > 2
    sizes = [
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("whole", "half")
    ]
    assert sizes[0]["metadata"]["total_size"] == 2 * sizes[1]["metadata"]["total_size"]


def test_a_number_beyond_the_types_range_is_refused(tmp_path: Path) -> None:
    folder = model_in(tmp_path, torch.float16)
    owner = LocalTrainer(TrainingConfig(device="cpu"), model=folder)
    owner.tensors()["model.norm.weight"].fill_(1e5)
    with pytest.raises(ModelFolderError, match="float16"):
        owner.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_type_of_a_folder_is_that_of_most_of_its_numbers(tmp_path: Path) -> None:
    made = tiny_model(tmp_path / "a")
    config = ModelConfig.from_hf(json.loads((made / "config.json").read_text()))
    state = {name: tensor.bfloat16() for name, tensor in load_model(made).state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].float()
    save_model(state, config, tmp_path / "mixed")
    assert types(tmp_path / "mixed/model.safetensors") == {"F32", "BF16"}
    assert stored_dtype(tmp_path / "mixed") == torch.bfloat16
    assert stored_dtype(made) == torch.float32
