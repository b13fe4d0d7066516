"""Every algorithm with every correction, against `loss_reference`: token by token, in Python floats."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import loss_reference as reference
import msgspec
import numpy as np
import pytest
import torch

from headrace.training.algorithms import Algorithm
from headrace.training.correction_config import Correction
from headrace.training.losses.columns import Columns, Units
from headrace.training.losses.policy import Sums, normaliser, policy_loss

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo", "clip_high": 0.3},
    "grpo by sequences": {"type": "grpo", "aggregate": "sequence"},
    "dr_grpo": {"type": "dr_grpo", "length": 64},
    "rloo": {"type": "rloo"},
    "rloo by sequences": {"type": "rloo", "aggregate": "sequence"},
    "reinforce++": {"type": "reinforce++"},
    "dapo": {"type": "dapo"},
    "gspo": {"type": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    "gspo by tokens": {"type": "gspo", "aggregate": "token"},
    "ppo": {"type": "ppo"},
    "ppo, dual clip": {"type": "ppo", "dual_clip": 3.0},
}
CORRECTIONS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    **{
        f"{kind} by {level}s{', geometric' * geometric}": [{"type": kind, "level": level, "geometric": geometric}]
        for kind in ("tis", "mis", "topr")
        for level in ("token", "turn", "sequence")
        for geometric in (False, True)
    },
    "cispo": [{"type": "cispo", "low": 0.2, "high": 0.3}],
    "decoupled": [{"type": "decoupled"}],
    "decoupled, interpolated": [{"type": "decoupled", "proximal": "interpolated", "cap": 3.0}],
    "rejection": [{"type": "rejection", "low": 0.6, "high": 1.5}],
    "rejection by turns": [{"type": "rejection", "level": "turn", "low": 0.6, "high": 1.5}],
    "opsm": [{"type": "opsm", "delta": 0.1}],
    "version drop": [{"type": "version_drop", "max_lag": 2}],
    "version drop by turns": [{"type": "version_drop", "level": "turn", "max_lag": 2}],
    "version drop by sequences": [{"type": "version_drop", "level": "sequence", "max_lag": 3}],
    "kimi": [{"type": "kimi", "tau": 0.3}],
    "several": [
        {"type": "decoupled", "proximal": "interpolated"},
        {"type": "rejection", "low": 0.5, "high": 2.0},
        {"type": "opsm", "delta": 0.5},
        {"type": "version_drop", "max_lag": 3},
        {"type": "kimi", "tau": 0.1},
    ],
}
TOLERANCES = [(torch.float64, 1e-9, 10), (torch.float32, 1e-5, 5)]


def draw(seed: int, *, spread: float = 0.6, absurd: bool = True) -> list[reference.Token]:
    """Sequences of one to four turns, down to a single token; numbers that float32 holds."""
    dice = np.random.default_rng(seed)
    tokens, turn = [], -1
    for sequence in range(int(dice.integers(1, 7))):
        advantage = float(np.float32(dice.choice([0.0, 1.0, -1.0]) * dice.exponential()))
        for _ in range(int(dice.integers(1, 5))):
            turn += 1
            lag = int(dice.integers(0, 6))
            for _ in range(int(dice.choice([1, 2, 5]))):
                now, apart = -dice.exponential(2.0), spread * dice.standard_normal()
                if absurd and dice.random() < 0.03:
                    apart = float(dice.choice([-300.0, -25.0, 25.0, 300.0]))
                behaviour = float(np.float32(now - apart))
                tokens.append(reference.Token(float(np.float32(now)), behaviour, advantage, lag, turn, sequence))
                lag = max(0, lag - int(dice.integers(0, 2)))
    return tokens


def configured(algorithm: dict[str, Any], corrections: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    return msgspec.convert(algorithm, Algorithm), [msgspec.convert(one, Correction) for one in corrections]


def whole(config: Any) -> dict[str, Any]:
    """With all defaults, as the reference wants it."""
    recipe = getattr(config, "recipe", None)
    given = msgspec.to_builtins(config)
    return given if recipe is None else given | {"aggregate": recipe.aggregate, "length": recipe.length}


def columns_of(tokens: list[reference.Token], dtype: torch.dtype) -> Columns:
    def runs(numbers: list[int]) -> Units:
        _, firsts, sizes = np.unique(numbers, return_index=True, return_counts=True)
        return Units(torch.from_numpy(sizes[np.argsort(firsts)]), len(numbers))

    now, behaviour, advantages = (
        torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)
        for name in ("now", "behaviour", "advantage")
    )
    lags = torch.tensor([token.lag for token in tokens])
    turns, sequences = ([getattr(token, name) for token in tokens] for name in ("turn", "sequence"))
    entropy = torch.linspace(0.1, 2.0, len(tokens), dtype=dtype).requires_grad_()
    return Columns(now.requires_grad_(), behaviour, advantages, lags, runs(turns), runs(sequences), entropy)


def computed(
    tokens: list[reference.Token], algorithm: Any, corrections: list[Any], dtype: torch.dtype
) -> tuple[float, np.ndarray, Sums]:
    columns = columns_of(tokens, dtype)
    divisor = normaliser(len(tokens), len({token.sequence for token in tokens}), algorithm.recipe)
    loss, sums = policy_loss(columns, algorithm.recipe, corrections, divisor)
    (gradient,) = torch.autograd.grad(loss, columns.logprobs_t)
    return loss.item(), gradient.double().numpy(), sums


@pytest.mark.parametrize(("dtype", "tolerance", "batches"), TOLERANCES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_gradient_and_sums_are_the_reference_s(
    algorithm: str, dtype: torch.dtype, tolerance: float, batches: int
) -> None:
    for name, seed in itertools.product(CORRECTIONS, range(batches)):
        chosen, wanted = configured(ALGORITHMS[algorithm], CORRECTIONS[name])
        tokens = draw(seed)
        expected = reference.loss(whole(chosen), [whole(one) for one in wanted], tokens)
        value, gradient, sums = computed(tokens, chosen, wanted, dtype)
        # Terms of both signs cancel: what counts is their size.
        size = max(abs(expected.value), math.fsum(map(abs, expected.gradient)))
        assert abs(value - expected.value) <= tolerance * size, (name, seed)
        scale = max(map(abs, expected.gradient))
        np.testing.assert_allclose(
            gradient, expected.gradient, rtol=tolerance, atol=tolerance * scale, err_msg=f"{name}, {seed}"
        )
        for sum_of in ("clipped", "outliers"):
            assert getattr(sums, sum_of).item() == getattr(expected, sum_of), (name, seed)
        assert sums.kl.item() == pytest.approx(expected.kl, rel=max(tolerance, 1e-9))
        assert sums.weights.item() == pytest.approx(math.fsum(expected.weights), rel=tolerance)
        assert sums.dropped.item() == expected.weights.count(0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_finite_differences(algorithm: str) -> None:
    """Of the reference's value, with what has no gradient held where it was."""
    tokens, step = draw(3, absurd=False), 1e-6
    live = [token.now for token in tokens]
    for name, given in CORRECTIONS.items():
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        how = whole(chosen), [whole(one) for one in wanted]
        _, gradient, _ = computed(tokens, chosen, wanted, torch.float64)
        for place in range(len(tokens)):
            higher, lower = (
                reference.loss_at([x + sign * step * (i == place) for i, x in enumerate(live)], *how, tokens).value
                for sign in (1, -1)
            )
            assert gradient[place] == pytest.approx((higher - lower) / (2 * step), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_at_lag_0_every_correction_s_gradient_is_the_uncorrected_one(algorithm: str) -> None:
    tokens = [
        reference.Token(token.now, token.now, token.advantage, 0, token.turn, token.sequence)
        for token in draw(5, absurd=False)
    ]
    assert any(token.advantage for token in tokens)
    for name, given in CORRECTIONS.items():
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        value, gradient, sums = computed(tokens, chosen, wanted, torch.float64)
        plain_value, plain_gradient, _ = computed(tokens, chosen, [], torch.float64)
        assert value == plain_value
        np.testing.assert_array_equal(gradient, plain_gradient, err_msg=name)
        assert sums.weights.item() == len(tokens)
        assert sums.dropped.item() == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_add_up_to_the_whole_batch(algorithm: str) -> None:
    tokens = draw(7, absurd=False)
    sequences = sorted({token.sequence for token in tokens})
    assert len(sequences) > 2
    parts = [
        columns_of([token for token in tokens if token.sequence in some], torch.float64)
        for some in (sequences[:1], sequences[1:])
    ]
    for name, given in CORRECTIONS.items():
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        divisor = normaliser(len(tokens), len(sequences), chosen.recipe)
        value, gradient, _ = computed(tokens, chosen, wanted, torch.float64)
        losses = [policy_loss(part, chosen.recipe, wanted, divisor)[0] for part in parts]
        both = zip(losses, parts, strict=True)
        gradients = [torch.autograd.grad(loss, part.logprobs_t)[0] for loss, part in both]
        assert sum(loss.item() for loss in losses) == pytest.approx(value, rel=1e-12, abs=1e-15), name
        np.testing.assert_allclose(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_batch_that_is_dropped_as_a_whole_has_no_loss_and_no_gradient(algorithm: str) -> None:
    tokens = [
        reference.Token(token.now, token.behaviour, token.advantage, 9, token.turn, token.sequence)
        for token in draw(1)
    ]
    chosen, wanted = configured(ALGORITHMS[algorithm], [{"type": "version_drop", "max_lag": 8}])
    value, gradient, sums = computed(tokens, chosen, wanted, torch.float64)
    assert value == 0
    assert not gradient.any()
    assert sums.dropped.item() == len(tokens)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_an_advantage_there_is_no_gradient(algorithm: str) -> None:
    tokens = [
        reference.Token(token.now, token.behaviour, 0.0, token.lag, token.turn, token.sequence) for token in draw(2)
    ]
    for given in CORRECTIONS.values():
        if any(one["type"] == "kimi" for one in given):
            continue
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        value, gradient, _ = computed(tokens, chosen, wanted, torch.float64)
        assert value == 0
        assert not gradient.any()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_entropy_bonus_is_shared_out_as_the_objective_is(algorithm: str) -> None:
    chosen, _ = configured(ALGORITHMS[algorithm], [])
    tokens = draw(4, absurd=False)
    columns = columns_of(tokens, torch.float64)
    sizes = Counter(token.sequence for token in tokens)
    divisor = normaliser(len(tokens), len(sizes), chosen.recipe)
    plain, _ = policy_loss(columns, chosen.recipe, [], divisor)
    loss, _ = policy_loss(columns, chosen.recipe, [], divisor, entropy_bonus=0.03)
    by_sequence = chosen.recipe.aggregate == "sequence"
    shares = [1 / (divisor * (sizes[token.sequence] if by_sequence else 1)) for token in tokens]
    bonus = sum(share * entropy for share, entropy in zip(shares, columns.entropy_t.tolist(), strict=True))
    assert loss.item() == pytest.approx(plain.item() - 0.03 * bonus, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, columns.entropy_t)
    np.testing.assert_allclose(gradient, [-0.03 * share for share in shares], rtol=1e-12)
