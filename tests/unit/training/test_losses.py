"""Every algorithm with every correction, in a batch's first update and in later ones, with a reference policy and
without, against `loss_reference`: token by token, in Python floats."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import loss_reference as reference
import msgspec
import numpy as np
import pytest
import torch
from training_builders import batch_of, episode, turn

from headrace.records import Batch, Episode
from headrace.training.algorithms import Algorithm
from headrace.training.config import KlEstimator, ReferenceConfig, TrainingConfig
from headrace.training.correction_config import Correction
from headrace.training.losses.columns import Columns, Units
from headrace.training.losses.policy import Sums, normaliser, policy_loss
from headrace.training.packing import TrainingSequence, training_sequences
from headrace.training.reference import with_prices

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
ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
ABSURD = (-300.0, -25.0, 25.0, 300.0)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several, much slower where other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
                    apart = float(dice.choice(ABSURD))
                behaviour = float(np.float32(now - apart))
                tokens.append(reference.Token(float(np.float32(now)), behaviour, advantage, lag, turn, sequence))
                lag = max(0, lag - int(dice.integers(0, 2)))
    return tokens


def beside(
    tokens: list[reference.Token],
    column: Literal["proximal", "reference"],
    seed: int,
    *,
    spread: float = 0.4,
    absurd: bool = True,
) -> list[reference.Token]:
    """With another policy's log-probs in `column`, that far from the trainer's now."""
    dice = np.random.default_rng((seed, column == "reference"))
    apart = spread * dice.standard_normal(len(tokens))
    if absurd:
        apart = np.where(dice.random(len(tokens)) < 0.03, dice.choice(ABSURD, len(tokens)), apart)
    return [
        replace(token, **{column: float(np.float32(token.now - x))}) for token, x in zip(tokens, apart, strict=True)
    ]


def beside_both(seed: int) -> list[reference.Token]:
    """A later update's, with a reference policy; nothing absurd."""
    tokens = beside(draw(seed, absurd=False), "proximal", seed, absurd=False)
    return beside(tokens, "reference", seed, absurd=False)


def penalty(estimator: KlEstimator, into: Literal["loss", "reward"] = "loss") -> ReferenceConfig:
    """Not checked: k1 has a value in the loss too."""
    return ReferenceConfig(coefficient=0.07, estimator=estimator, into=into)


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
    others = [
        None if None in column else torch.tensor(column, dtype=dtype)
        for column in ([getattr(token, name) for token in tokens] for name in ("proximal", "reference"))
    ]
    return Columns(
        now.requires_grad_(), behaviour, advantages, lags, runs(turns), runs(sequences), entropy, *others
    )


def computed(
    tokens: list[reference.Token],
    algorithm: Any,
    corrections: list[Any],
    dtype: torch.dtype,
    paid: ReferenceConfig | None = None,
) -> tuple[float, np.ndarray, Sums]:
    columns = columns_of(tokens, dtype)
    divisor = normaliser(len(tokens), len({token.sequence for token in tokens}), algorithm.recipe)
    loss, sums = policy_loss(columns, algorithm.recipe, corrections, divisor, reference=paid)
    (gradient,) = torch.autograd.grad(loss, columns.logprobs_t)
    return loss.item(), gradient.double().numpy(), sums


def assert_agrees(
    tokens: list[reference.Token],
    algorithm: str,
    corrections: str,
    dtype: torch.dtype,
    tolerance: float,
    paid: ReferenceConfig | None = None,
    case: object = None,
) -> None:
    chosen, wanted = configured(ALGORITHMS[algorithm], CORRECTIONS[corrections])
    price = None if paid is None else whole(paid)
    expected = reference.loss(whole(chosen), [whole(one) for one in wanted], tokens, price)
    value, gradient, sums = computed(tokens, chosen, wanted, dtype, paid)
    # Terms of both signs cancel: what counts is their size.
    size = max(abs(expected.value), math.fsum(map(abs, expected.gradient)))
    assert abs(value - expected.value) <= tolerance * size, (corrections, case)
    scale = max(map(abs, expected.gradient))
    np.testing.assert_allclose(
        gradient, expected.gradient, rtol=tolerance, atol=tolerance * scale, err_msg=f"{corrections}, {case}"
    )
    for sum_of in ("clipped", "outliers"):
        assert getattr(sums, sum_of).item() == getattr(expected, sum_of), (corrections, case)
    assert sums.kl.item() == pytest.approx(expected.kl, rel=max(tolerance, 1e-9))
    assert sums.weights.item() == pytest.approx(math.fsum(expected.weights), rel=tolerance)
    assert sums.dropped.item() == expected.weights.count(0.0)
    assert sums.reference_kl.item() == pytest.approx(expected.reference_kl, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance", "batches"), TOLERANCES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_loss_gradient_and_sums_are_the_reference_s(
    algorithm: str, dtype: torch.dtype, tolerance: float, batches: int
) -> None:
    for name, seed in itertools.product(CORRECTIONS, range(batches)):
        assert_agrees(draw(seed), algorithm, name, dtype, tolerance, case=seed)


@pytest.mark.parametrize(("dtype", "tolerance", "batches"), TOLERANCES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_a_later_update_of_a_batch_they_are_the_reference_s(
    algorithm: str, dtype: torch.dtype, tolerance: float, batches: int
) -> None:
    for name, seed in itertools.product(CORRECTIONS, range(batches)):
        assert_agrees(beside(draw(seed), "proximal", seed), algorithm, name, dtype, tolerance, case=seed)


@pytest.mark.parametrize(("dtype", "tolerance", "batches"), TOLERANCES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_a_reference_policy_they_are_the_reference_s(
    algorithm: str, estimator: KlEstimator, dtype: torch.dtype, tolerance: float, batches: int
) -> None:
    for name, seed in itertools.product(CORRECTIONS, range(1 + batches // 2)):
        tokens = beside(draw(seed), "reference", seed, absurd=seed % 3 == 0)
        if seed % 2:
            tokens = beside(tokens, "proximal", seed)
        assert_agrees(tokens, algorithm, name, dtype, tolerance, penalty(estimator), case=seed)


def differences(
    tokens: list[reference.Token], algorithm: Any, corrections: list[Any], paid: ReferenceConfig | None, step: float
) -> list[float]:
    """Of the reference's value, with what has no gradient held where it was."""
    price = None if paid is None else whole(paid)
    how = whole(algorithm), [whole(one) for one in corrections], tokens, price
    found = []
    for place in range(len(tokens)):
        higher, lower = (
            reference.loss_at(
                [token.now + sign * step * (i == place) for i, token in enumerate(tokens)], *how
            ).value
            for sign in (1, -1)
        )
        found.append((higher - lower) / (2 * step))
    return found


@pytest.mark.parametrize("estimator", [None, "k2", "k3"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradients_are_finite_differences(algorithm: str, estimator: KlEstimator | None) -> None:
    """Without a reference policy in a first update, with one in a later."""
    tokens = draw(3, absurd=False) if estimator is None else beside_both(2)
    paid = None if estimator is None else penalty(estimator)
    for name, given in CORRECTIONS.items():
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        _, gradient, _ = computed(tokens, chosen, wanted, torch.float64, paid)
        expected = differences(tokens, chosen, wanted, paid, 1e-6)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_far_from_the_reference_gradients_are_finite_differences(algorithm: str, estimator: KlEstimator) -> None:
    """Beyond ±20 every estimate is level, a line or a parabola: a step can be wide, which large values need."""
    far = [*ABSURD, -20.5, 20.5]
    tokens = [
        reference.Token(-2.0, -2.5, 0.0, 1, i // 2, i // 3, proximal=-1.5, reference=-2.0 - x)
        for i, x in enumerate(far)
    ]
    chosen, wanted = configured(ALGORITHMS[algorithm], CORRECTIONS["tis by tokens"])
    _, gradient, sums = computed(tokens, chosen, wanted, torch.float64, penalty(estimator))
    expected = differences(tokens, chosen, wanted, penalty(estimator), 0.25)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    k3 = sum(math.exp(-max(x, -20.0)) - 1 + max(x, -20.0) for x in far)
    by_hand = {"k1": sum(far), "k2": sum(x * x / 2 for x in far), "k3": k3}
    assert sums.reference_kl.item() == pytest.approx(by_hand[estimator], rel=1e-12)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_given_proximal_policy_counts_where_a_correction_looks_at_it(algorithm: str) -> None:
    """Not where only the recorded log-probs are the surrogate's anchor."""
    tokens = draw(5, absurd=False)
    later = beside(tokens, "proximal", 5, absurd=False)
    for name, given in CORRECTIONS.items():
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        first_value, first_gradient, _ = computed(tokens, chosen, wanted, torch.float64)
        value, gradient, _ = computed(later, chosen, wanted, torch.float64)
        looked_at = any(one["type"] in {*reference.WEIGHING, "rejection"} - {"cispo"} for one in given)
        unchanged = value == first_value and np.array_equal(gradient, first_gradient)
        assert unchanged != looked_at, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_under_a_correction_the_clip_has_work_from_the_second_update_on(algorithm: str) -> None:
    chosen, wanted = configured(ALGORITHMS[algorithm], CORRECTIONS["tis by tokens"])
    tokens = draw(7, absurd=False)
    *_, first = computed(tokens, chosen, wanted, torch.float64)
    *_, later = computed(beside(tokens, "proximal", 7, absurd=False), chosen, wanted, torch.float64)
    assert first.clipped.item() == 0
    assert (later.clipped.item() > 0) == (chosen.recipe.clip is not None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_under_cispo_every_token_keeps_its_gradient_in_every_update(algorithm: str) -> None:
    chosen, wanted = configured(ALGORITHMS[algorithm], CORRECTIONS["cispo"])
    tokens = beside(draw(7, absurd=False), "proximal", 7, absurd=False)
    _, gradient, sums = computed(tokens, chosen, wanted, torch.float64)
    assert sums.clipped.item() == 0
    assert all(np.asarray(gradient)[[token.advantage != 0 for token in tokens]] != 0)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_the_loss_of_no_tokens_is_0(aggregate: str) -> None:
    chosen, wanted = configured({"type": "grpo", "aggregate": aggregate}, CORRECTIONS["tis by tokens"])
    nothing = torch.zeros(0, dtype=torch.float64)
    none = Units(torch.zeros(0, dtype=torch.int64), 0)
    columns = Columns(nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64), none, none, nothing)
    loss, _ = policy_loss(columns, chosen.recipe, wanted, normaliser(0, 0, chosen.recipe))
    assert loss.item() == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_policy_that_is_its_reference_pays_nothing(algorithm: str) -> None:
    tokens = [replace(token, reference=token.now) for token in draw(6)]
    for given, estimator in itertools.product(CORRECTIONS.values(), ("k2", "k3")):
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        plain_value, plain_gradient, _ = computed(tokens, chosen, wanted, torch.float64)
        value, gradient, sums = computed(tokens, chosen, wanted, torch.float64, penalty(estimator))
        assert value == plain_value
        np.testing.assert_array_equal(gradient, plain_gradient)
        assert sums.reference_kl.item() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_price_in_the_reward_is_none_in_the_loss(algorithm: str, estimator: KlEstimator) -> None:
    tokens = beside_both(2)
    chosen, wanted = configured(ALGORITHMS[algorithm], CORRECTIONS["tis by tokens"])
    plain_value, plain_gradient, _ = computed(tokens, chosen, wanted, torch.float64)
    value, gradient, sums = computed(tokens, chosen, wanted, torch.float64, penalty(estimator, "reward"))
    expected = reference.loss(
        whole(chosen), [whole(one) for one in wanted], tokens, whole(penalty(estimator, "reward"))
    )
    assert value == plain_value == pytest.approx(expected.value, rel=1e-9)
    np.testing.assert_array_equal(gradient, plain_gradient)
    assert sums.reference_kl.item() == pytest.approx(expected.reference_kl, rel=1e-12)


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


@pytest.mark.parametrize("estimator", [None, *ESTIMATORS])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_micro_batches_add_up_to_the_whole_batch(algorithm: str, estimator: KlEstimator | None) -> None:
    """Without a reference policy in a first update, with one in a later."""
    tokens = draw(7, absurd=False) if estimator is None else beside_both(7)
    paid = None if estimator is None else penalty(estimator)
    sequences = sorted({token.sequence for token in tokens})
    assert len(sequences) > 2
    parts = [
        columns_of([token for token in tokens if token.sequence in some], torch.float64)
        for some in (sequences[:1], sequences[1:])
    ]
    for name, given in CORRECTIONS.items():
        chosen, wanted = configured(ALGORITHMS[algorithm], given)
        divisor = normaliser(len(tokens), len(sequences), chosen.recipe)
        value, gradient, sums = computed(tokens, chosen, wanted, torch.float64, paid)
        shares = [policy_loss(part, chosen.recipe, wanted, divisor, reference=paid) for part in parts]
        both = zip(shares, parts, strict=True)
        gradients = [torch.autograd.grad(loss, part.logprobs_t)[0] for (loss, _), part in both]
        assert sum(loss.item() for loss, _ in shares) == pytest.approx(value, rel=1e-12, abs=1e-15), name
        np.testing.assert_allclose(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15, err_msg=name)
        away = sum(of_part.reference_kl.item() for _, of_part in shares)
        assert away == pytest.approx(sums.reference_kl.item(), rel=1e-12)


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
def test_tokens_that_are_dropped_pay_for_their_distance_from_the_reference(algorithm: str) -> None:
    far = [-0.5, 0.25, 1.0, -2.0, 0.75]
    tokens = [
        reference.Token(-2.0, -1.5, 1.0, 9, place // 2, place // 2, reference=-2.0 - x)
        for place, x in enumerate(far)
    ]
    chosen, wanted = configured(ALGORITHMS[algorithm], [{"type": "version_drop", "max_lag": 8}])
    value, gradient, _ = computed(tokens, chosen, wanted, torch.float64, penalty("k2"))
    shares = {
        "token": [1 / 5] * 5,
        "sequence": [1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 3],
        "constant": [1 / (3 * chosen.recipe.length)] * 5,
    }[chosen.recipe.aggregate]
    assert value == pytest.approx(sum(0.07 * share * x * x / 2 for share, x in zip(shares, far, strict=True)))
    np.testing.assert_allclose(gradient, [0.07 * share * x for share, x in zip(shares, far, strict=True)])


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


def priced_batch(seed: int) -> tuple[Batch, list[TrainingSequence], list[list[tuple[float, float]]]]:
    """Episodes that fork, with turns that another policy took, one with nothing to train; (b, q) of what is
    trained, episode by episode."""
    dice = np.random.default_rng(seed)
    columns: dict[int, np.ndarray] = {}
    made: list[Episode] = []
    pairs: list[list[tuple[float, float]]] = []
    for number in range(9):
        turns = []
        count = 4 if number == 0 else int(dice.integers(1, 5))
        for parent, policy in ((None, "policy"), (0, "policy"), (0, "other"), (2, "policy"))[:count]:
            size = int(dice.integers(1, 6))
            context, tokens = dice.integers(0, 32, (2, size)).astype(np.int32)
            policy = "other" if number == 5 else policy
            turns.append(turn(context, tokens, logprobs=-dice.exponential(2.0, size), parent=parent, policy=policy))
            apart = 0.5 * dice.standard_normal(size)
            if seed % 2:
                apart = np.where(dice.random(size) < 0.1, dice.choice(ABSURD, size), apart)
            columns[id(turns[-1])] = (turns[-1].logprobs - apart).astype(np.float32)
        made.append(episode(*turns, id=f"e{number}", reward=float(dice.choice([0.0, 0.5, 1.0]))))
        own = [one for one in turns if one.policy == "policy"]
        pairs.append(
            [both for one in own for both in zip(one.logprobs.tolist(), columns[id(one)].tolist(), strict=True)]
        )
    batch = batch_of(made, [0.0] * len(made), group_size=3)
    sequences = [
        sequence._replace(
            reference=np.concatenate(
                [columns[id(one)] for one, flag in zip(sequence.turns, sequence.trained, strict=True) if flag]
            )
        )
        for sequence in training_sequences(batch)
    ]
    return batch, sequences, pairs


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "given",
    [
        *ALGORITHMS.values(),
        {"type": "grpo", "normalise_std": False},
        {"type": "reinforce++", "group_baseline": False},
        {"type": "dapo", "overlong_limit": 12, "overlong_buffer": 5, "overlong_penalty": 0.5},
    ],
    ids=str,
)
def test_a_price_in_the_reward_gives_the_reference_s_advantages(
    given: dict[str, Any], estimator: KlEstimator
) -> None:
    algorithm, paid = msgspec.convert(given, Algorithm), penalty(estimator, "reward")
    for seed in range(10):
        batch, sequences, pairs = priced_batch(seed)
        rewards = [one.reward for one in batch.episodes]
        less = reference.priced(whole(paid), rewards, pairs)
        groups, lengths = (
            [column[i : i + 3] for i in range(0, len(column), 3)]
            for column in (less, [one.num_tokens for one in batch.episodes])
        )
        expected = reference.advantages(msgspec.to_builtins(algorithm), groups, lengths)
        found, moved = with_prices(batch, sequences, TrainingConfig(algorithm=algorithm, reference=paid))
        scale = max(map(abs, expected))
        np.testing.assert_allclose(found.advantages, expected, rtol=1e-6, atol=1e-7 * scale, err_msg=str(seed))
        of_episode = dict(zip((one.id for one in batch.episodes), found.advantages.tolist(), strict=True))
        assert len(sequences) > len({sequence.episode for sequence in sequences})
        for before, after in zip(sequences, moved, strict=True):
            assert after.advantage == of_episode[before.episode]
            assert after._replace(advantage=before.advantage) == before
        assert [one.reward for one in found.episodes] == rewards


def test_a_price_in_the_reward_by_hand() -> None:
    """k2 of 1 and of 2 nats: one of two equal rewards falls by β · (0.5 + 2)."""
    far = turn(np.zeros(1, np.int32), np.zeros(2, np.int32), logprobs=np.array([-1.0, -3.0]))
    near = turn(np.zeros(1, np.int32), np.zeros(1, np.int32), logprobs=np.array([-2.0]))
    batch = batch_of([episode(far, id="far", reward=1.0), episode(near, id="near", reward=1.0)], [0.0, 0.0])
    columns = {"far": np.array([-2.0, -5.0], np.float32), "near": np.array([-2.0], np.float32)}
    sequences = [one._replace(reference=columns[one.episode]) for one in training_sequences(batch)]
    algorithm = msgspec.convert({"type": "dr_grpo"}, Algorithm)
    found, _ = with_prices(batch, sequences, TrainingConfig(algorithm=algorithm, reference=penalty("k2", "reward")))
    np.testing.assert_allclose(found.advantages, [-0.07 * 2.5 / 2, 0.07 * 2.5 / 2], rtol=1e-6)
