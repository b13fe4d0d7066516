"""Learning from a teacher, which is another model or the policy as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from training_builders import batch_of, episode, ints, random_batch, tiny_model, turn

from headrace.errors import ConfigError, RecordError, RunFolderError
from headrace.records import Batch
from headrace.training.algorithms import DapoConfig, PpoConfig, RlooConfig
from headrace.training.config import (
    DistillationConfig,
    LoraConfig,
    OptimizerConfig,
    ReferenceConfig,
    TrainingConfig,
)
from headrace.training.correction_config import KimiConfig, TisConfig
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

LORA = LoraConfig(rank=2)
BACKENDS = ["native", "transformers"]


def trainer(folder: Path, distillation: DistillationConfig, **more: Any) -> LocalTrainer:
    config = TrainingConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2), device="cpu", distillation=distillation, **more
    )
    return LocalTrainer(config, model=folder)


def named(batch: Batch, version: int = 0, **changes: Any) -> Batch:
    episodes = [e.with_(id=f"e{i}") for i, e in enumerate(batch.episodes)]
    made = batch_of(episodes, batch.advantages.tolist(), version=version, group_size=4)
    return msgspec.structs.replace(made, **changes)


def distributions(owner: LocalTrainer, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        hidden, head = owner._backend.hidden(pack(training_sequences(batch)))
    return (hidden @ head.T).double().log_softmax(-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_a_student_comes_near_its_teacher(tmp_path: Path, backend: str, lora, divergence: str) -> None:
    mine, other = tiny_model(tmp_path / "mine"), tiny_model(tmp_path / "other", seed=5, hidden_size=48)
    owner = trainer(mine, DistillationConfig(teacher=str(other), divergence=divergence), backend=backend, lora=lora)  # type: ignore[arg-type]
    theirs = distributions(LocalTrainer(TrainingConfig(device="cpu"), model=other), named(random_batch(0)))
    ours = distributions(owner, named(random_batch(0)))
    middle = torch.logaddexp(ours, theirs) - np.log(2)
    to, back = ((a.exp() * (a - b)).sum(-1).mean().item() for a, b in ((theirs, ours), (ours, theirs)))
    both = [(a.exp() * (a - middle)).sum(-1).mean().item() / 2 for a in (ours, theirs)]
    expected = {"forward": to, "reverse": back, "jsd": sum(both)}[divergence]
    found = [owner.train(named(random_batch(0), version)).metrics for version in range(20)]
    assert found[0]["teacher_divergence"] == pytest.approx(expected, rel=1e-4)
    assert found[0]["loss"] == pytest.approx(expected, rel=1e-4)
    assert found[-1]["teacher_divergence"] < 0.7 * expected


def test_rewards_count_where_they_are_asked_for(tmp_path: Path) -> None:
    mine, other = tiny_model(tmp_path / "mine"), tiny_model(tmp_path / "other", seed=5)
    batch = named(random_batch(1))
    turned = msgspec.structs.replace(batch, advantages=-batch.advantages)
    alone = DistillationConfig(teacher=str(other), coefficient=0.5)
    for how, equal in ((alone, True), (msgspec.structs.replace(alone, rewards=True), False)):
        losses = [trainer(mine, how).train(one).metrics for one in (batch, turned)]
        assert (losses[0]["loss"] == losses[1]["loss"]) is equal
        assert losses[0]["teacher_divergence"] == losses[1]["teacher_divergence"]
    assert trainer(mine, alone).train(batch).metrics["loss"] == pytest.approx(
        0.5 * losses[0]["teacher_divergence"], rel=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_policy_of_some_versions_ago_teaches_it(tmp_path: Path, backend: str, lora, dtype: str) -> None:
    folder, probe = tiny_model(tmp_path), pack(training_sequences(named(random_batch(9))))
    how = DistillationConfig(every=2, coefficient=0.1, rewards=True)
    owner = trainer(folder, how, backend=backend, lora=lora, dtype=dtype)
    teachers, hidden = [], {}
    for version in range(9):
        with torch.no_grad():
            hidden[version] = owner._backend.hidden(probe)[0]
        report = owner.train(named(random_batch(version), version))
        assert report.teacher is not None
        teachers.append(report.teacher)
        assert torch.equal(owner._teacher.say(probe).hidden_te, hidden[report.teacher])  # type: ignore[union-attr]
    assert teachers == [0, 0, 0, 0, 2, 2, 4, 4, 6]
    assert not torch.equal(hidden[0], hidden[2])


def test_a_restored_trainer_has_the_teacher_it_had(tmp_path: Path) -> None:
    folder, how = tiny_model(tmp_path / "model"), DistillationConfig(every=2, coefficient=0.1, rewards=True)
    whole, first = trainer(folder, how), trainer(folder, how)
    for version in range(5):
        whole.train(named(random_batch(version), version))
        first.train(named(random_batch(version), version))
    first.save(tmp_path / "checkpoint", {})
    second = trainer(folder, how)
    second.load(tmp_path / "checkpoint")
    for version in range(5, 9):
        reports = [owner.train(named(random_batch(version), version)) for owner in (whole, second)]
        assert reports[0].teacher == reports[1].teacher
        assert reports[0].metrics == pytest.approx(reports[1].metrics)
    without = LocalTrainer(TrainingConfig(device="cpu"), model=folder)
    without.save(tmp_path / "without", {})
    second.load(tmp_path / "without")
    assert second.train(named(random_batch(0))).teacher == 0


def test_a_teacher_may_have_rows_for_more_tokens_than_there_are(tmp_path: Path) -> None:
    mine, other = tiny_model(tmp_path / "mine"), tiny_model(tmp_path / "other", vocab_size=40)
    assert trainer(mine, DistillationConfig(teacher=str(other))).train(named(random_batch(0))).metrics["loss"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("supported", [False, True], ids=["whole", "support"])
def test_ids_that_the_teacher_does_not_have_are_left_out(tmp_path: Path, backend: str, supported: bool) -> None:
    mine, other = tiny_model(tmp_path / "mine", vocab_size=40), tiny_model(tmp_path / "other", seed=5)
    support = [[5, 1, 39], [3, 2, 33, 8], [31, 32]]
    only = turn(ints(1, 2), ints(5, 3, 31), support=support if supported else None)
    batch = batch_of([episode(only)], [0.0])
    ours = distributions(LocalTrainer(TrainingConfig(device="cpu"), model=mine), batch)
    theirs = distributions(LocalTrainer(TrainingConfig(device="cpu"), model=other), batch)
    common = [[i for i in row if i < 32] for row in support] if supported else [list(range(32))] * 3
    found = [
        (q[ids].log_softmax(-1).exp() * (q[ids].log_softmax(-1) - p[ids].log_softmax(-1))).sum()
        for q, p, ids in zip(ours, theirs, common, strict=True)
    ]
    report = trainer(mine, DistillationConfig(teacher=str(other)), backend=backend).train(batch)
    assert report.metrics["teacher_divergence"] == pytest.approx(torch.stack(found).mean().item(), rel=1e-4)


def test_a_token_that_the_teacher_does_not_have_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    mine, other = tiny_model(tmp_path / "mine", vocab_size=40), tiny_model(tmp_path / "other", seed=5)
    owner = trainer(mine, DistillationConfig(teacher=str(other)))
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    with pytest.raises(RecordError, match=r"below the teacher's vocabulary's size 32; in 'e' one is not.*got 32"):
        owner.train(batch_of([episode(turn(ints(1, 2), ints(5, 32)))], [0.0]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())
    assert owner.version == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_checkpoints_before_and_after_the_first_change_of_teachers(
    tmp_path: Path, backend: str, lora, dtype: str, steps: int
) -> None:
    folder, how = tiny_model(tmp_path / "model"), DistillationConfig(every=3, coefficient=0.1, rewards=True)
    one, other = (trainer(folder, how, backend=backend, lora=lora, dtype=dtype) for _ in range(2))
    for version in range(steps):
        one.train(named(random_batch(version), version))
    one.save(tmp_path / "checkpoint", {})
    other.load(tmp_path / "checkpoint")
    # After a restore old numbers are not used again; the teacher's turn comes by steps all the same.
    other.version += 10
    for step in range(steps, steps + 5):
        reports = [owner.train(named(random_batch(step), owner.version)) for owner in (one, other)]
        assert reports[0].metrics["loss"] == reports[1].metrics["loss"]
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


def test_a_checkpoint_s_teacher_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    how = DistillationConfig(every=3, rewards=True)
    one, other = (trainer(tiny_model(tmp_path / name), how) for name in ("a", "b"))
    one.train(named(random_batch(0)))
    one._teacher._now.weights.pop("model.norm.weight")  # type: ignore[union-attr]
    one.save(tmp_path / "checkpoint", {})
    before = {name: tensor.clone() for name, tensor in other.tensors().items()}
    with pytest.raises(RunFolderError, match="teacher"):
        other.load(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.tensors().items())


def test_settings_that_undo_each_other_are_refused() -> None:
    taught = DistillationConfig(teacher="there")
    with pytest.raises(ConfigError, match="nothing ever moves it"):
        DistillationConfig().check()
    refused = {
        "exact": TrainingConfig(numerics="exact", distillation=taught),
        "resample": TrainingConfig(algorithm=DapoConfig(), distillation=taught),
        "shuffle_rewards": TrainingConfig(shuffle_rewards=True, distillation=taught),
        "into": TrainingConfig(
            algorithm=RlooConfig(), reference=ReferenceConfig(into="reward"), distillation=taught
        ),
        "standard deviation": TrainingConfig(reference=ReferenceConfig(into="reward")),
        "min_group of at least 2": TrainingConfig(algorithm=DapoConfig(), min_group=1),
        "correction tis": TrainingConfig(corrections=(TisConfig(),), distillation=taught),
        "geometric": TrainingConfig(corrections=(TisConfig(geometric=True),)),
    }
    for words, config in refused.items():
        with pytest.raises(ConfigError, match=words):
            config.check()
    TrainingConfig(algorithm=RlooConfig(), reference=ReferenceConfig(into="reward")).check()
    TrainingConfig(corrections=(KimiConfig(),), distillation=taught, group_size=1, min_group=1).check()
    TrainingConfig(algorithm=PpoConfig(), group_size=1, min_group=1).check()
    TrainingConfig(algorithm=DapoConfig(), distillation=DistillationConfig(rewards=True)).check()
