"""Replaying turns of a run whose versions are adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headrace.audit.evidence import Evidence, StoredStep
from headrace.audit.findings import Findings
from headrace.audit.kept import KeptVersions
from headrace.audit.recompute import replay_logprobs
from headrace.audit.replay import recompute_episodes
from headrace.audit.sample import Place, Sample
from headrace.config.load import read_config
from headrace.config.run import RunConfig
from headrace.engine.config import NativeEngineConfig
from headrace.errors import RunFolderError
from headrace.ledger import Ledger
from headrace.models import (
    CachedContext,
    CausalLM,
    Fp8Ops,
    ModelConfig,
    PackedContext,
    load_model,
    quantize_together,
    random_model,
    save_model,
)
from headrace.records import Episode, KvEvent, Sampling, Task, Turn
from headrace.telemetry.episodes import StoredEpisode
from headrace.telemetry.folder import RunFolder
from headrace.training.config import LoraConfig, TrainingConfig
from headrace.training.trainer import LocalTrainer

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
)
LORA = LoraConfig(rank=3, alpha=4.5, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A model, and the versions 0 to 2 of an adapter that a trainer kept; each far from the others."""
    save_model(random_model(MODEL, 0), MODEL, tmp_path / "model")
    owner = LocalTrainer(TrainingConfig(device="cpu", lora=LORA), model=tmp_path / "model")
    draw = torch.Generator().manual_seed(1)
    for version in range(3):
        owner.version = version
        for tensor in owner.tensors().values():
            tensor.normal_(0, 0.15, generator=draw)
        owner.keep(version, tmp_path / "versions" / f"{version:07d}.safetensors")
    return RunFolder(tmp_path)


def engine(**options: object) -> NativeEngineConfig:
    return NativeEngineConfig(device="cpu", **options)  # type: ignore[arg-type]


def kept(run: RunFolder, config: NativeEngineConfig) -> KeptVersions:
    return KeptVersions(run.path / "model", run.versions, config, LORA)


def served(run: RunFolder, version: int, dtype: torch.dtype) -> CausalLM:
    """The model that an engine serves, by PEFT alone: base and adapter apart, both in its type."""
    model = load_model(run.path / "model", dtype=dtype)
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets))  # type: ignore
    wrapped = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    tensors = load_file(run.versions / f"{version:07d}.safetensors")
    peft.set_peft_model_state_dict(wrapped, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    return model


@torch.no_grad()
def sample(run: RunFolder, lineage: tuple[KvEvent, ...], count: int, seed: int, dtype: torch.dtype) -> Turn:
    """Token by token, changing the model, and perhaps its cache, where the lineage says so."""
    sequence, logprobs, versions = PROMPT.tolist(), [], []
    draw = torch.Generator().manual_seed(seed)
    cache, model, done = CachedContext(MODEL.num_layers), None, 0
    for _ in range(count):
        for event in lineage:
            if event.position == done:
                number, model = event.version, served(run, event.version, dtype)
                if event.before == "recomputed":
                    cache, done = CachedContext(MODEL.num_layers), 0
        assert model is not None
        new = torch.tensor(sequence[done:])
        hidden = model(new, torch.arange(done, len(sequence)), cache)
        done = len(sequence)
        logp = model.logits(hidden[-1:]).float()[0].div(0.8).log_softmax(-1)
        token = int(torch.multinomial(logp.exp(), 1, generator=draw))
        sequence.append(token)
        logprobs.append(float(logp[token]))
        versions.append(number)
    return Turn(
        tokens=np.array(sequence[len(PROMPT) :], np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        context=PROMPT,
        stop="length",
        sampling=Sampling(temperature=0.8),
        lineage=lineage,
        adapter="policy",
    )


def lineages() -> list[tuple[KvEvent, ...]]:
    start = KvEvent(position=0, version=0, before="recomputed", cause="start")
    return [
        (start,),
        (start, KvEvent(position=12, version=1, before="kept")),
        (
            start,
            KvEvent(position=11, version=1, before="recomputed"),
            KvEvent(position=15, version=2, before="kept"),
        ),
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_replayed_log_probs_are_those_sampled_with_the_adapter(
    run: RunFolder, dtype: str, tolerance: float
) -> None:
    versions = kept(run, engine(dtype=dtype))
    assert versions.numbers == {0, 1, 2}
    for seed, lineage in enumerate(lineages()):
        turn = sample(run, lineage, 12, seed, getattr(torch, dtype))
        again = replay_logprobs(versions.model, PROMPT, turn)
        np.testing.assert_allclose(again, turn.logprobs, atol=tolerance)
        other = replay_logprobs(lambda number: versions.model((number + 1) % 3), PROMPT, turn)
        assert abs(other - turn.logprobs).max() > 0.1


def test_versions_share_the_models_own_weights_and_not_their_adapters(run: RunFolder) -> None:
    versions = kept(run, engine(dtype="bfloat16"))
    one, other = (dict(versions.model(number).named_parameters()) for number in (1, 2))
    assert len(one) == 2 * 11 + 3 + 2 * 2 * 5
    for name, parameter in one.items():
        assert parameter.dtype == torch.bfloat16
        assert (other[name] is parameter) == ("lora_" not in name), name
    shaken = dict(versions.shaken(1).named_parameters())
    assert {name for name in one if shaken[name] is not one[name]} == {n for n in one if n.endswith("norm.weight")}


def test_a_version_that_is_no_adapter_of_the_run_is_refused(run: RunFolder) -> None:
    save_file(dict(random_model(MODEL, 3).state_dict()), run.versions / "0000007.safetensors")
    with pytest.raises(RunFolderError, match="its adapter's tensors"):
        kept(run, engine()).model(7)


@pytest.mark.parametrize("weights", ["same", "fp8"])
def test_with_fp8_projections_the_adapter_is_added_to_what_they_give(run: RunFolder, weights: str) -> None:
    found = hidden_of(kept(run, engine(weight_dtype=weights)).model(1))
    ops = Fp8Ops(quantize_together if weights == "fp8" else None)
    model = load_model(run.path / "model", ops=ops)
    tensors = load_file(run.versions / "0000001.safetensors")
    for name, module in list(model.named_modules()):
        if name.endswith(LORA.targets):
            a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, Sum(module, ops, a, b))
    assert torch.equal(found, hidden_of(model))


class Sum(nn.Module):
    """By the definition: W x + (alpha / rank) · B (A x)."""

    def __init__(self, linear: nn.Module, ops: Fp8Ops, a: torch.Tensor, b: torch.Tensor):
        super().__init__()
        self.linear, self.ops, self.a, self.b = linear, ops, a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.linear.weight, self.linear.bias) + x @ self.a.T @ self.b.T * (4.5 / 3)


@torch.no_grad()
def hidden_of(model: CausalLM) -> torch.Tensor:
    packed = PackedContext([9])
    hidden: torch.Tensor = model(torch.arange(9), packed.positions, packed)
    return hidden


# ── The audit's own way there ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def config(run: RunFolder) -> RunConfig:
    (run.path / "run.toml").write_text(
        f'model.path = "{run.path / "model"}"\ntasks = {{ type = "jsonl", path = "t" }}\nengine.device = "cpu"\n'
        f"training.lora = {{ rank = 3, alpha = 4.5, targets = {list(LORA.targets)} }}\n"
    )
    return read_config(run.path / "run.toml")


def recomputed(run: RunFolder, config: RunConfig, turns: list[Turn]) -> tuple[dict[str, Any], Findings]:
    """What an audit finds that recomputes an episode of each turn."""
    items = [stored(turn, number) for number, turn in enumerate(turns)]
    evidence = Evidence(
        ledger=Ledger(":memory:"), config=config, steps=[StoredStep(1, lambda: iter(items), "step 1")], folder=run
    )
    sample, findings = Sample(evidence, 10), Findings()
    for line, item in enumerate(items):
        sample.offer(item, Place(1, line))
    return recompute_episodes(evidence, sample, findings), findings


def stored(turn: Turn, number: int) -> StoredEpisode:
    episode = Episode(id=f"e{number}", task=Task(id="t", prompt="p"), turns=(turn,), reward=0.0)
    return StoredEpisode(episode, "g", 0, 0, 1, 3, 4, 0.0, None)


def test_an_audit_recomputes_a_run_with_an_adapter(run: RunFolder, config: RunConfig) -> None:
    turns = [sample(run, lineage, 12, 7, torch.float32) for lineage in lineages()]
    figures, findings = recomputed(run, config, turns)
    assert [v for v in findings.violations if "was drawn" not in v.what] == [], "these tokens were drawn otherwise"
    assert (figures["episodes"], figures["tokens"]) == (3, 36)
    assert figures["max_abs_diff"] < 1e-5


def test_an_audit_finds_an_adapter_that_was_not_the_one_served(run: RunFolder, config: RunConfig) -> None:
    turn = sample(run, lineages()[1], 12, 7, torch.float32)
    (run.versions / "0000002.safetensors").replace(run.versions / "0000001.safetensors")
    _, findings = recomputed(run, config, [turn])
    (violation,) = [v for v in findings.violations if "was drawn" not in v.what]
    assert violation.law == "provenance"
    assert "of version 1" in violation.what
