"""A reference policy beside the one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from training_builders import batch_of, random_batch, tiny_model

from headrace.errors import ConfigError
from headrace.records import Batch
from headrace.training.algorithms import RlooConfig
from headrace.training.config import LoraConfig, OptimizerConfig, ReferenceConfig, TrainingConfig
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

CHOICES = [
    ("native", None),
    ("native", LoraConfig(rank=2)),
    ("transformers", None),
    ("transformers", LoraConfig(rank=2)),
]


def trainer(folder: Path, reference: ReferenceConfig | None, **more: Any) -> LocalTrainer:
    rate = more.pop("rate", 1e-2)
    config = TrainingConfig(
        optimizer=OptimizerConfig(learning_rate=rate), device="cpu", reference=reference, **more
    )
    return LocalTrainer(config, model=folder)


def named(batch: Batch, **changes: Any) -> Batch:
    episodes = [e.with_(id=f"e{i}") for i, e in enumerate(batch.episodes)]
    made = batch_of(episodes, batch.advantages.tolist(), version=batch.version, group_size=4)
    return msgspec.structs.replace(made, **changes)


def still(batch: Batch, version: int) -> Batch:
    return named(batch, advantages=np.zeros_like(batch.advantages), version=version)


def logprobs(owner: LocalTrainer, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return owner._backend.token_logprobs(pack(training_sequences(batch)))[0]


@pytest.mark.parametrize(("backend", "lora"), CHOICES)
def test_the_policy_is_drawn_back_to_the_model_that_the_run_began_with(
    tmp_path: Path, backend: str, lora: LoraConfig | None
) -> None:
    folder, batch = tiny_model(tmp_path), named(random_batch(0))
    owner = trainer(folder, ReferenceConfig(coefficient=1.0), backend=backend, lora=lora)
    begun = logprobs(owner, batch)
    found = owner._reference.logprobs(pack(training_sequences(batch)))
    torch.testing.assert_close(found, begun)
    assert owner.train(batch).metrics["reference_kl"] == pytest.approx(0, abs=1e-6)
    for version in range(1, 4):
        owner.train(named(random_batch(version), version=version))
    assert not torch.allclose(logprobs(owner, batch), begun, atol=0.05), "it has moved"
    torch.testing.assert_close(owner._reference.logprobs(pack(training_sequences(batch))), begun)
    distances = [owner.train(still(batch, version)).metrics["reference_kl"] for version in range(4, 30)]
    assert distances[-1] < 0.5 * distances[0]


def test_a_reference_of_its_own_is_loaded_frozen(tmp_path: Path) -> None:
    mine, other = tiny_model(tmp_path / "mine"), tiny_model(tmp_path / "other", seed=5)
    batch = named(random_batch(1))
    reference = ReferenceConfig(model=str(other), estimator="k2")
    owner = trainer(mine, reference, dtype="bfloat16")
    frozen = owner._reference._frozen
    assert frozen.parameters() == {}
    assert {p.dtype for p in frozen._model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in frozen._model.parameters())
    away = logprobs(owner, batch) - owner._reference.logprobs(pack(training_sequences(batch)))
    expected = (away.double().square() / 2).mean().item()
    assert owner.train(batch).metrics["reference_kl"] == pytest.approx(expected, rel=1e-4)


def test_a_reference_that_lacks_tokens_is_refused(tmp_path: Path) -> None:
    small = tiny_model(tmp_path / "small", vocab_size=24)
    with pytest.raises(ConfigError, match="every token that the policy can sample"):
        trainer(tiny_model(tmp_path / "own"), reference=ReferenceConfig(coefficient=0.1, model=str(small)))


def test_as_a_reward_it_moves_advantages_and_leaves_rewards_as_they_were(tmp_path: Path) -> None:
    mine, other = tiny_model(tmp_path / "mine"), tiny_model(tmp_path / "other", seed=5)
    batch = named(random_batch(2))
    equal = batch_of([e.with_(reward=0.5) for e in batch.episodes], [0.0] * 12, group_size=4)
    plain = trainer(mine, None).train(equal).metrics
    assert plain["grad_norm"] == 0
    reference = ReferenceConfig(model=str(other), estimator="k1", into="reward", coefficient=0.1)
    paying = trainer(mine, reference, algorithm=RlooConfig()).train(equal).metrics
    assert paying["grad_norm"] > 0
    assert paying["zero_advantage_frac"] == 0
    assert paying["reward_mean"] == plain["reward_mean"] == 0.5


def test_a_loss_without_an_expected_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected gradient is 0"):
        ReferenceConfig(estimator="k1", into="loss").check()
