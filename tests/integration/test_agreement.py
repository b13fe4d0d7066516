"""The trainer, with the code it trains with, recomputes what the engine recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from integration_project import make_model

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.models import CausalLM, load_model
from headrace.records import Batch, Episode, Group, Sampling, Task, Turn
from headrace.training.backends.base import open_backend
from headrace.training.config import TrainingConfig
from headrace.training.packing import pack_micro_batches, training_sequences

TOLERANCE = 1e-4
WANTED = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agreement") / "model"
    make_model(path)
    return path


def version(folder: Path, number: int) -> CausalLM:
    """Weights that stand for a version: those of the folder, moved about a little."""
    model = load_model(folder)
    noise = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise), alpha=0.05 * (number > 0))
    return model


def sample(folder: Path, sampling: Sampling, *, kv: str | None) -> list[Turn]:
    """Turns of at least 10,000 tokens; with `kv`, weights are swapped every tenth step."""
    engine = NativeEngine(version(folder, 0), NativeEngineConfig(max_context=64, max_running=128), version=0)
    dice = np.random.default_rng(0)
    turns, asked, steps, served = [], 0, 0, 0
    while sum(len(turn.tokens) for turn in turns) < WANTED:
        while engine.running + engine.waiting < 128:
            asked += 1
            context = dice.integers(0, 16, dice.integers(3, 12)).astype(np.int32)
            engine.add(SampleRequest(id=asked, context=context, max_tokens=48, sampling=sampling, seed=asked))
        turns += [turn for _, turn in engine.step()]
        steps += 1
        if kv is not None and steps % 10 == 0:
            served += 1
            for name, parameter in version(folder, served).named_parameters():
                engine.standby[name].copy_(parameter.detach())
            engine.swap(served, "recompute" if kv == "recompute" else "keep")
    return turns


def trainer_logprobs(model_folder: Path, turns: list[Turn], weights: CausalLM | None = None) -> list[np.ndarray]:
    """What a training step would compute for each turn, packed as it packs them."""
    backend = open_backend(model_folder, TrainingConfig(device="cpu"))
    if weights is not None:
        with torch.no_grad():
            for name, parameter in backend.parameters().items():
                parameter.copy_(weights.state_dict()[name])
    task = Task(id="t", prompt="")
    episodes = tuple(Episode(id=str(i), task=task, turns=(turn,), reward=0.0) for i, turn in enumerate(turns))
    group = Group(id="g", sequence=0, task=task, episodes=episodes)
    batch = Batch(step=1, version=0, groups=(group,), advantages=np.ones(len(turns), np.float32))
    found: dict[bytes, np.ndarray] = {}
    with torch.no_grad():
        for packed in pack_micro_batches(training_sequences(batch), 4096):
            logprobs, _ = backend.token_logprobs(packed)
            starts = np.cumsum(packed.trained_s) - packed.trained_s
            for start, count in zip(starts, packed.trained_s, strict=True):
                found[packed.behaviour_n[start : start + count].tobytes()] = logprobs[start : start + count].numpy()
    return [found[turn.logprobs.tobytes()] for turn in turns]


TRUNCATIONS = {
    "no truncation": Sampling(temperature=0.8),
    "top-p": Sampling(top_p=0.8),
    "top-k and min-p": Sampling(temperature=1.2, top_k=6, min_p=0.05),
}


@pytest.mark.parametrize("sampling", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_a_training_pass_recomputes_ten_thousand_tokens(folder, sampling):
    turns = sample(folder, sampling, kv=None)
    again = trainer_logprobs(folder, turns)
    worst = max(float(abs(new - turn.logprobs).max()) for new, turn in zip(again, turns, strict=True))
    assert sum(len(turn.tokens) for turn in turns) >= WANTED
    assert worst <= TOLERANCE


@pytest.mark.parametrize("sampling", [TRUNCATIONS["no truncation"], TRUNCATIONS["top-p"]], ids=["all", "top-p"])
def test_with_kv_recomputed_one_training_pass_per_version_is_enough(folder, sampling):
    turns = [turn for turn in sample(folder, sampling, kv="recompute") if len(turn.tokens)]
    assert sum(len(set(turn.versions.tolist())) > 1 for turn in turns) > 50
    worst = 0.0
    for number in sorted({number for turn in turns for number in turn.versions.tolist()}):
        touched = [turn for turn in turns if number in turn.versions]
        again = trainer_logprobs(folder, touched, version(folder, number))
        for new, turn in zip(again, touched, strict=True):
            mine = turn.versions == number
            worst = max(worst, float(abs(new - turn.logprobs)[mine].max()))
    assert sum(len(turn.tokens) for turn in turns) >= WANTED
    assert worst <= TOLERANCE


@pytest.mark.parametrize("sampling", [TRUNCATIONS["no truncation"], TRUNCATIONS["top-p"]], ids=["all", "top-p"])
def test_with_kv_kept_the_lineage_is_replayed_segment_by_segment(folder, sampling):
    turns = sample(folder, sampling, kv="keep")
    models = {number: version(folder, number) for turn in turns for number in set(turn.versions.tolist())}
    assert sum(len(set(turn.versions.tolist())) > 1 for turn in turns) > 50
    worst = 0.0
    for turn in turns:
        again = replay_logprobs(
            lambda number: models.setdefault(number, version(folder, number)), turn.context, turn
        )
        worst = max(worst, float(abs(again - turn.logprobs).max()))
    assert sum(len(turn.tokens) for turn in turns) >= WANTED
    assert worst <= TOLERANCE
