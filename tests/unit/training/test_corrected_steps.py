"""Whole training steps with algorithms and corrections: the trainer's columns, not the formulas, are on trial."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import loss_reference as reference
import msgspec
import numpy as np
import pytest
import torch
from test_losses import whole
from training_builders import batch_of, episode, ints, tiny_model, turn

from headrace.errors import ConfigError
from headrace.records import Batch
from headrace.training.algorithms import Algorithm
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.correction_config import Correction
from headrace.training.packing import pack, training_sequences
from headrace.training.trainer import LocalTrainer

VERSION = 5
CHOICES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"type": "grpo"}, [{"type": "tis", "level": "turn", "cap": 1.5}]),
    ({"type": "gspo"}, [{"type": "rejection", "level": "turn", "low": 0.5, "high": 1.5}]),
    ({"type": "dr_grpo"}, [{"type": "decoupled", "proximal": "interpolated"}]),
    ({"type": "rloo"}, [{"type": "version_drop", "max_lag": 2, "level": "turn"}]),
    ({"type": "ppo", "dual_clip": 2.0}, [{"type": "opsm", "delta": 0.0}, {"type": "kimi", "tau": 0.2}]),
    ({"type": "dapo"}, [{"type": "mis", "level": "sequence", "geometric": True}]),
]


def trainer(
    folder: Path, algorithm: dict[str, Any], corrections: list[dict[str, Any]], **more: Any
) -> LocalTrainer:
    config = TrainingConfig(
        optimizer=OptimizerConfig(learning_rate=1e-3),
        device="cpu",
        algorithm=msgspec.convert(algorithm, Algorithm),
        corrections=tuple(msgspec.convert(one, Correction) for one in corrections),
        **more,
    )
    owner = LocalTrainer(config, model=folder)
    owner.version = VERSION
    return owner


def old_batch(owner: LocalTrainer) -> tuple[Batch, list[reference.Token]]:
    """Episodes of one and two turns, sampled near the trainer's policy by several versions; and their tokens."""
    dice = np.random.default_rng(0)

    def some(count: int) -> np.ndarray:
        return ints(*dice.integers(1, 32, count).tolist())

    episodes, advantages = [], []
    for number in range(8):
        turns = [turn(some(3), some(int(dice.integers(1, 6))), version=dice.integers(1, 6, 1).repeat(1)[0].item())]
        if number % 2:
            versions = np.sort(dice.integers(1, 6, 4))
            turns.append(turn(some(2), some(4), version=versions, parent=0))
        episodes.append(episode(*turns, id=f"e{number}", reward=0.0))
        advantages.append(float(np.float32(dice.standard_normal() * (number != 2))))
    batch = batch_of(episodes, advantages, version=VERSION, group_size=4)
    sequences = training_sequences(batch)
    with torch.no_grad():
        now = owner._backend.token_logprobs(pack(sequences))[0].numpy()
    behaviour = (now + 0.4 * dice.standard_normal(len(now))).astype(np.float32)
    tokens, sampled, at, turn_number = [], [], 0, 0
    for number, sequence in enumerate(sequences):
        turns = []
        for one in sequence.turns:
            end = at + len(one.tokens)
            turns.append(msgspec.structs.replace(one, logprobs=behaviour[at:end]))
            for place, version in zip(range(at, end), one.versions.tolist(), strict=True):
                numbers = float(now[place]), float(behaviour[place]), sequence.advantage, VERSION - version
                tokens.append(reference.Token(*numbers, turn_number, number))
            at, turn_number = end, turn_number + 1
        sampled.append(episode(*turns, id=sequence.episode, reward=0.0))
    return batch_of(sampled, advantages, version=VERSION, group_size=4), tokens


@pytest.mark.parametrize("budget", [10_000, 20])
@pytest.mark.parametrize(("algorithm", "corrections"), CHOICES)
def test_a_steps_loss_is_the_formulas(tmp_path: Path, algorithm, corrections, budget: int) -> None:
    owner = trainer(tiny_model(tmp_path), algorithm, corrections, micro_batch_tokens=budget)
    batch, tokens = old_batch(owner)
    config = owner._config
    expected = reference.loss(whole(config.algorithm), [whole(one) for one in config.corrections], tokens)
    metrics = owner.train(batch).metrics
    assert metrics["loss"] == pytest.approx(expected.value, rel=1e-4, abs=1e-7)
    assert metrics["clip_frac"] == pytest.approx(expected.clipped / len(tokens))
    assert metrics["weight_mean"] == pytest.approx(sum(expected.weights) / len(tokens), rel=1e-4)
    assert metrics["weight_zero_frac"] == pytest.approx(expected.weights.count(0.0) / len(tokens))
    squares = sum(weight**2 for weight in expected.weights)
    effective = sum(expected.weights) ** 2 / (len(tokens) * squares)
    assert metrics["weighted_sample_frac"] == pytest.approx(effective, rel=1e-4)
    ratios = [math.exp(token.now - token.behaviour) for token in tokens]
    effective = sum(ratios) ** 2 / (len(tokens) * sum(ratio**2 for ratio in ratios))
    assert metrics["effective_sample_frac"] == pytest.approx(effective, rel=1e-4)


def test_a_regulariser_also_moves_what_has_no_advantage(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path), {"type": "grpo"}, [{"type": "kimi", "tau": 0.2}])
    batch, _ = old_batch(owner)
    still = msgspec.structs.replace(batch, advantages=np.zeros_like(batch.advantages))
    assert owner.train(still).metrics["grad_norm"] > 1e-3


def test_two_corrections_that_weigh_tokens_are_refused() -> None:
    both = tuple(msgspec.convert({"type": name}, Correction) for name in ("tis", "cispo"))
    with pytest.raises(ConfigError, match="at most one") as refused:
        TrainingConfig(corrections=both).check()
    assert refused.value.value == "tis, cispo"


def test_an_entropy_bonus_flattens_what_nothing_else_moves(tmp_path: Path) -> None:
    owner = trainer(tiny_model(tmp_path), {"type": "grpo"}, [], entropy_bonus=1.0)
    batch, _ = old_batch(owner)
    found = []
    for step in range(8):
        still = msgspec.structs.replace(batch, advantages=np.zeros_like(batch.advantages), version=VERSION + step)
        metrics = owner.train(still).metrics
        assert metrics["loss"] == pytest.approx(-metrics["entropy"], rel=1e-5)
        found.append(metrics["entropy"])
    assert found[-1] > found[0] + 0.05
