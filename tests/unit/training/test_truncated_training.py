"""Episodes that were cut and are left out of the loss: the step is that of a batch which never had them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from training_builders import batch_of, episode, ints, random_batch, tiny_model, turn

from headrace.records import Batch, Episode
from headrace.training.algorithms import DrGrpoConfig
from headrace.training.config import OptimizerConfig, ReferenceConfig, TrainingConfig
from headrace.training.correction_config import KimiConfig
from headrace.training.packing import training_sequences
from headrace.training.reference import with_prices
from headrace.training.trainer import LocalTrainer


def trainer(folder: Path, **options: object) -> LocalTrainer:
    config = TrainingConfig(optimizer=OptimizerConfig(learning_rate=1e-2), device="cpu", **options)  # type: ignore[arg-type]
    return LocalTrainer(config, model=folder)


def cut(one: Episode) -> Episode:
    *before, last = one.turns
    return one.with_(turns=(*before, turn(last.context, last.tokens, logprobs=last.logprobs, stop="length")))


def some_cut(batch: Batch, places: set[int]) -> tuple[Batch, Batch]:
    """(with the episodes at `places` cut, without them)."""
    pairs = list(zip(batch.episodes, batch.advantages.tolist(), strict=True))
    marked = [cut(e) if i in places else e for i, (e, _) in enumerate(pairs)]
    left = [pair for i, pair in enumerate(pairs) if i not in places]
    given = [0.0 if i in places else a for i, (_, a) in enumerate(pairs)]
    return batch_of(marked, given, group_size=4), batch_of([e for e, _ in left], [a for _, a in left])


@pytest.mark.parametrize("truncated", ["exclude", "baseline_only"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"entropy_bonus": 0.1},
        {"corrections": (KimiConfig(),)},
        {"reference": ReferenceConfig(coefficient=0.5)},
        {"epochs": 2},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_batch_without_the_masked_episodes(
    tmp_path: Path, truncated: str, more: dict[str, object]
) -> None:
    folder = tiny_model(tmp_path)
    with_them, without = some_cut(random_batch(0), {1, 6, 7})
    one, other = trainer(folder, truncated=truncated, **more), trainer(folder, **more)
    metrics, expected = one.train(with_them).metrics, other.train(without).metrics
    for name in ("loss", "grad_norm", "entropy", "kl", "weight_mean", "reference_kl"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(tensor, other.tensors()[name], rtol=0, atol=1e-4, msg=name)
    # The step consumed all of them, as the ledger counts it.
    assert metrics["masked_frac"] == 3 / 12
    assert metrics["tokens_trained"] == sum(e.num_tokens for e in with_them.episodes)
    assert expected["masked_frac"] == 0


def test_by_default_nothing_is_masked(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    batch = random_batch(0)
    marked = batch_of([cut(e) for e in batch.episodes], batch.advantages.tolist(), group_size=4)
    metrics, expected = (trainer(folder).train(one).metrics for one in (marked, batch))
    assert metrics["truncated_frac"] == 1
    assert metrics["masked_frac"] == 0
    assert {**metrics, "truncated_frac": 0} == expected


def test_a_batch_in_which_all_are_masked_is_a_step_that_moves_nothing(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path), truncated="exclude", entropy_bonus=0.1)
    before = {name: tensor.clone() for name, tensor in owner.tensors().items()}
    marked = [cut(e) for e in random_batch(0).episodes]
    metrics = owner.train(batch_of(marked, [0.0] * len(marked))).metrics
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["loss"] == metrics["grad_norm"] == 0
    assert metrics["masked_frac"] == 1
    assert metrics["tokens_trained"] == sum(e.num_tokens for e in marked)
    assert owner.version == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in owner.tensors().items())


@pytest.mark.parametrize(
    ("truncated", "expected"),
    # Rewards 1, 0 and −3 less 0, 1 and 4 nats at half a unit: 1, −0.5 and −5.
    [("exclude", [0.75, -0.75, 0.0]), ("baseline_only", [2.5, 1.0, 0.0]), ("train", [2.5, 1.0, -3.5])],
)
def test_a_masked_episodes_price_counts_where_its_reward_does(truncated: str, expected: list[float]) -> None:
    tokens, logprob = ints(3), np.array([-1.0])
    marks = [(1.0, "stop", 0.0), (0.0, "stop", 1.0), (-3.0, "length", 4.0)]
    made = [
        episode(turn(ints(1), tokens, logprobs=logprob, stop=stop), id=str(i), reward=reward)
        for i, (reward, stop, _) in enumerate(marks)
    ]
    batch = batch_of(made, [0.0] * 3)
    sequences = [
        one._replace(reference=np.array([-1.0 - far], np.float32))
        for one, (_, _, far) in zip(training_sequences(batch), marks, strict=True)
    ]
    how = ReferenceConfig(coefficient=0.5, estimator="k1", into="reward")
    config = TrainingConfig(algorithm=DrGrpoConfig(), reference=how, truncated=truncated)  # type: ignore[arg-type]
    found, _ = with_prices(batch, sequences, config)
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-6)
