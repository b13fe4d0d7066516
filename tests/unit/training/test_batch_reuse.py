"""Several updates of one batch: what each trains on, against what, and what is seen of the weights in between."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from training_builders import batch_of, random_batch, tiny_model

from headrace.errors import ConfigError, HeadraceError
from headrace.records import Batch, WeightVersion
from headrace.training.config import LoraConfig, OptimizerConfig, TrainingConfig
from headrace.training.correction_config import Correction
from headrace.training.packing import minibatches, training_sequences
from headrace.training.remote import Stage, _Publishing
from headrace.training.trainer import LocalTrainer

LORA = LoraConfig(rank=2)


def trainer(folder: Path, corrections: tuple[dict[str, Any], ...] = (), **more: Any) -> LocalTrainer:
    config = TrainingConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2),
        device="cpu",
        corrections=tuple(msgspec.convert(one, Correction) for one in corrections),
        **more,
    )
    return LocalTrainer(config, model=folder)


def named(batch: Batch) -> Batch:
    """With an id for each episode."""
    episodes = [e.with_(id=f"e{i}") for i, e in enumerate(batch.episodes)]
    return batch_of(episodes, batch.advantages.tolist(), version=batch.version, group_size=4)


def again(batch: Batch, version: int) -> Batch:
    return msgspec.structs.replace(batch, version=version, step=version)


def same(one: LocalTrainer, other: LocalTrainer) -> bool:
    return all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_epochs_are_steps_over_the_same_batch_and_one_version(tmp_path: Path, lora: LoraConfig | None) -> None:
    folder, batch = tiny_model(tmp_path), named(random_batch(0))
    reusing, stepping = trainer(folder, epochs=3, lora=lora), trainer(folder, lora=lora)
    metrics = reusing.train(batch).metrics
    steps = [stepping.train(again(batch, version)).metrics for version in range(3)]
    assert (reusing.version, reusing.step, metrics["updates"]) == (1, 1, 3)
    assert same(reusing, stepping)
    assert metrics["loss"] == pytest.approx(np.mean([one["loss"] for one in steps]))
    assert metrics["grad_norm"] == pytest.approx(np.mean([one["grad_norm"] for one in steps]))
    assert metrics["kl"] == pytest.approx(steps[0]["kl"]), "before anything was learned"
    assert metrics["tokens_trained"] == steps[0]["tokens_trained"]


def test_minibatches_are_whole_groups_each_once_an_epoch_drawn_anew() -> None:
    batch = named(random_batch(1, episodes=28))
    sequences = training_sequences(batch)
    drawn = [minibatches(batch, sequences, 3, (7, 1, epoch)) for epoch in range(8)]
    for parts in drawn:
        assert sorted(s.episode for part in parts for s in part) == sorted(s.episode for s in sequences)
        groups = [{int(s.episode[1:]) // 4 for s in part} for part in parts]
        assert sorted(len(group) for group in groups) == [2, 2, 3]
        assert all(len(part) == 4 * len(group) for part, group in zip(parts, groups, strict=True))
    assert len({str([[s.episode for s in part] for part in parts]) for parts in drawn}) > 4
    repeated = minibatches(batch, sequences, 3, (7, 1, 0))
    assert [[s.episode for s in part] for part in repeated] == [[s.episode for s in part] for part in drawn[0]]
    assert minibatches(batch, [], 3, (7, 1, 0)) == [[]]


def test_minibatches_are_steps_over_their_groups(tmp_path: Path) -> None:
    folder, batch = tiny_model(tmp_path), named(random_batch(2))
    reusing, stepping = trainer(folder, minibatches=3), trainer(folder)
    reusing.train(batch)
    for version, part in enumerate(minibatches(batch, training_sequences(batch), 3, (0, batch.step, 0))):
        chosen = {sequence.episode: sequence.advantage for sequence in part}
        episodes = [episode for episode in batch.episodes if episode.id in chosen]
        stepping.train(batch_of(episodes, [chosen[e.id] for e in episodes], version=version, group_size=4))
    assert same(reusing, stepping)


@pytest.mark.parametrize(
    "correction", [{"type": "tis"}, {"type": "decoupled"}, {"type": "rejection", "low": 0.5, "high": 1.1}]
)
def test_weights_are_of_the_policy_before_the_first_update(tmp_path: Path, correction: dict[str, Any]) -> None:
    """With a high rate the second update's policy is another one; its weights are the first's all the same."""
    folder, batch = tiny_model(tmp_path), named(random_batch(3))
    once, twice = trainer(folder, (correction,)), trainer(folder, (correction,), epochs=2)
    first, both = (owner.train(batch).metrics for owner in (once, twice))
    later = once.train(again(batch, 1)).metrics
    assert later["weight_mean"] != pytest.approx(first["weight_mean"], rel=1e-3), "by the policy of that time"
    assert both["weight_mean"] == pytest.approx(first["weight_mean"], rel=1e-5)
    if correction["type"] != "rejection":
        assert first["clip_frac"] == 0, "its anchor is the policy itself"
        assert both["clip_frac"] > 0, "the second update is clipped against the first's"


@pytest.mark.parametrize(("epochs", "expected"), [(1, 1), (2, 3)])
def test_a_forward_pass_before_is_for_later_updates_alone(tmp_path: Path, epochs: int, expected: int) -> None:
    folder, batch = tiny_model(tmp_path), named(random_batch(4))
    owner = trainer(folder, ({"type": "decoupled", "proximal": "interpolated"},), epochs=epochs)
    passes = []
    counted = owner._backend.token_logprobs
    owner._backend.token_logprobs = lambda packed: passes.append(1) or counted(packed)  # type: ignore[method-assign]
    owner.train(batch)
    assert len(passes) == expected


def test_nobody_sees_the_weights_between_two_updates(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path), epochs=3)
    seen = []
    step = owner._optimizer.step

    def watched(rate: float) -> None:
        seen.append((owner.version, owner.between))
        step(rate)

    owner._optimizer.step = watched  # type: ignore[method-assign]
    owner.train(named(random_batch(5)))
    assert seen == [(0, False), (0, True), (0, True)]
    assert (owner.version, owner.between) == (1, False)


def test_after_a_later_update_failed_nothing_more_is_done_with_the_weights(tmp_path: Path) -> None:
    owner, batch = trainer(tiny_model(tmp_path), epochs=2), named(random_batch(6))
    owner.save(tmp_path / "before", {})
    norm = owner._optimizer.norm
    norms = iter([norm, lambda: torch.tensor(float("nan"))])
    owner._optimizer.norm = lambda: next(norms)()  # type: ignore[method-assign]
    with pytest.raises(HeadraceError, match="finite"):
        owner.train(batch)
    assert owner.version == 0
    for use in (
        lambda: owner.train(batch),
        lambda: owner.save(tmp_path / "a", {}),
        lambda: owner.export(tmp_path / "b"),
        lambda: owner.keep(0, tmp_path / "c"),
    ):
        with pytest.raises(HeadraceError, match="between two"):
            use()
    owner.load(tmp_path / "before")
    owner._optimizer.norm = norm  # type: ignore[method-assign]
    assert owner.train(batch).version == 1


def test_more_minibatches_than_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="minibatches"):
        TrainingConfig(groups_per_batch=2, min_group=1, minibatches=3).check()


def test_a_version_that_is_asked_for_between_two_updates_is_not_given(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path), epochs=2)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    offered = []

    class Offers:
        def stage(self, *args: Any, **more: Any) -> Any:
            offered.append(args)

    publishing = _Publishing(owner, Offers(), answers.put)  # type: ignore[arg-type]
    step = owner._optimizer.step

    def asked_after(rate: float) -> None:
        step(rate)
        publishing.take(Stage(call=len(offered), version=WeightVersion(number=0, parent=None, step=0), to=()))

    owner._optimizer.step = asked_after  # type: ignore[method-assign]
    owner.train(named(random_batch(7)))
    assert [answers.get(timeout=10).error for _ in range(2)] == ["Superseded", "Superseded"]
    assert offered == []
