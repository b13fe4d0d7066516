from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_builders import tiny_model

from headrace.errors import RunFolderError
from headrace.training import checkpoint, random_state
from headrace.training.checkpoint import Checkpoint
from headrace.training.config import TrainingConfig
from headrace.training.trainer import LocalTrainer


def sample(step: int = 3, scale: float = 1.0) -> Checkpoint:
    return Checkpoint(
        weights={"w": torch.arange(6.0).reshape(2, 3) * scale},
        optimizer={"exp_avg/w": torch.ones(2, 3), "step/w": torch.tensor(3.0)},
        step=step,
        version=step + 1,
        state={"tasks": {"position": 9}},
        random=random_state.capture(),
    )


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = sample()
    checkpoint.save(tmp_path / "c", saved)
    loaded = checkpoint.load(tmp_path / "c")
    assert torch.equal(loaded.weights["w"], saved.weights["w"])
    assert torch.equal(loaded.optimizer["step/w"], saved.optimizer["step/w"])
    assert (loaded.step, loaded.version, loaded.state, loaded.random) == (3, 4, saved.state, saved.random)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_saving_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", sample())
    checkpoint.save(tmp_path / "c", sample(scale=2.0))
    assert checkpoint.load(tmp_path / "c").weights["w"][1, 2] == 10
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_that_fails_leaves_no_trace_and_the_old_one_in_place(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", sample())
    broken = Checkpoint(**{**vars(sample(scale=2.0)), "state": {"not json": object()}})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "c", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert checkpoint.load(tmp_path / "c").weights["w"][1, 2] == 5


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "random.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint.save(tmp_path / "c", sample())
    file = tmp_path / "c" / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    file.write_bytes(data[:-5] if damage == "cut" else data)
    if damage == "remove":
        file.unlink()
    with pytest.raises(RunFolderError, match=f"undamaged: {name}"):
        checkpoint.load(tmp_path / "c")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_a_damaged_state_is_refused(tmp_path: Path, text: str) -> None:
    checkpoint.save(tmp_path / "c", sample())
    (tmp_path / "c/state.json").write_text(text)
    with pytest.raises(RunFolderError, match="state"):
        checkpoint.load(tmp_path / "c")


def test_a_checkpoint_of_a_newer_format_says_so(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", sample())
    content = json.loads((tmp_path / "c/state.json").read_text())
    (tmp_path / "c/state.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(RunFolderError, match="format 99"):
        checkpoint.load(tmp_path / "c")


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="nowhere"):
        checkpoint.load(tmp_path / "nowhere")


def test_another_models_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    owners = [
        LocalTrainer(TrainingConfig(device="cpu"), model=tiny_model(tmp_path / family, family))
        for family in ("llama", "qwen3")
    ]
    owners[1].save(tmp_path / "c", {})
    before = {name: tensor.clone() for name, tensor in owners[0].tensors().items()}
    with pytest.raises(RunFolderError, match="q_norm"):
        owners[0].load(tmp_path / "c")
    assert all(torch.equal(tensor, before[name]) for name, tensor in owners[0].tensors().items())
