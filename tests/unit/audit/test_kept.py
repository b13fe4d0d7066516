from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.audit.kept import KeptVersions
from headrace.engine.config import NativeEngineConfig
from headrace.models import ExactOps, ModelConfig, ReferenceOps, random_model, save_model

MODEL = ModelConfig(
    family="llama",
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


def kept(folder: Path, engine: NativeEngineConfig) -> KeptVersions:
    save_model(random_model(MODEL, 0), MODEL, folder / "model")
    (folder / "versions").mkdir()
    save_file(dict(random_model(MODEL, 3).state_dict()), folder / "versions" / "3.safetensors")
    return KeptVersions(folder / "model", folder / "versions", engine)


def test_a_kept_version_has_its_weights_in_the_engine_s_type(tmp_path: Path) -> None:
    versions = kept(tmp_path, NativeEngineConfig(dtype="bfloat16"))
    assert versions.numbers == {3}
    model = versions.model(3)
    assert type(model.ops) is ReferenceOps
    assert torch.equal(model.head_weight, random_model(MODEL, 3).head_weight.bfloat16())


def test_versions_of_an_exact_engine_compute_exactly(tmp_path: Path) -> None:
    assert type(kept(tmp_path, NativeEngineConfig(numerics="exact", device="cpu")).model(3).ops) is ExactOps
