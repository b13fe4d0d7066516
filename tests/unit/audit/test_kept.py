from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.audit.kept import KeptVersions, shaken
from headrace.engine.config import NativeEngineConfig
from headrace.models import (
    CausalLM,
    ExactOps,
    Fp8Ops,
    ModelConfig,
    PackedContext,
    ReferenceOps,
    quantize_together,
    random_model,
    save_model,
)

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


@pytest.mark.parametrize("kv", ["same", "fp8"])
@pytest.mark.parametrize("weights", ["same", "fp8"])
def test_versions_of_an_fp8_engine_compute_by_its_definition(tmp_path: Path, kv: str, weights: str) -> None:
    engine = NativeEngineConfig(kv_dtype=kv, weight_dtype=weights)
    found = hidden_of(kept(tmp_path, engine).model(3))
    model = random_model(MODEL, 3)
    if "fp8" in (kv, weights):
        model.use(Fp8Ops(quantize_together if weights == "fp8" else None, kv=kv == "fp8"))
    assert torch.equal(found, hidden_of(model))
    assert torch.equal(found, hidden_of(random_model(MODEL, 3))) == (kv == weights == "same")


@torch.no_grad()
def hidden_of(model: CausalLM) -> torch.Tensor:
    packed = PackedContext([9])
    hidden: torch.Tensor = model(torch.arange(9), packed.positions, packed)
    return hidden


def test_versions_of_an_exact_engine_compute_exactly(tmp_path: Path) -> None:
    assert type(kept(tmp_path, NativeEngineConfig(numerics="exact", device="cpu")).model(3).ops) is ExactOps


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2**-23), ("bfloat16", 2**-7)])
def test_a_shaken_version_differs_by_one_rounding_of_its_norms_and_shares_all_else(
    tmp_path, dtype, rounding
) -> None:
    versions = kept(tmp_path, NativeEngineConfig(dtype=dtype, weight_dtype="fp8"))
    model, other = versions.model(3), versions.shaken(3)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    norms = {name for name in ours if name.endswith("norm.weight")}
    assert len(norms) == 3
    for name in ours.keys() - norms:
        assert theirs[name] is ours[name]
    off = torch.cat([(theirs[name].double() / ours[name].double() - 1) for name in norms])
    assert {*off.tolist()} == {-rounding, rounding}
    assert not torch.equal(hidden_of(other), hidden_of(model))
    again = shaken(model, seed=3)
    assert torch.equal(hidden_of(again), hidden_of(other))
