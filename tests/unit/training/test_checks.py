from __future__ import annotations

import numpy as np
import pytest
from training_builders import batch_of, episode, ints, turn

from headrace.errors import LawBroken, RecordError
from headrace.records import Turn
from headrace.training.checks import check_batch


def check(*turns: Turn, version: int = 5, trainer: int = 5, bound: int | None = 2, advantage: float = 1.0) -> None:
    batch = batch_of([episode(*turns, id="the-one")], [advantage], version=version)
    check_batch(batch, version=trainer, max_staleness=bound, vocab_size=10)


def test_a_batch_within_the_bound_passes() -> None:
    check(turn(ints(1), ints(2, 3), version=np.array([3, 5])))


def test_a_batch_made_for_another_version_breaks_the_law() -> None:
    with pytest.raises(LawBroken, match="made for version 4, the trainer is at 5"):
        check(turn(ints(1), ints(2), version=4), version=4)


def test_a_token_older_than_the_bound_breaks_the_law() -> None:
    with pytest.raises(LawBroken, match=r"staleness.*'the-one'.*version 2.*oldest allowed is 3"):
        check(turn(ints(1), ints(2, 3), version=np.array([2, 5])))


def test_without_a_bound_any_age_is_allowed() -> None:
    check(turn(ints(1), ints(2), version=0), bound=None)


def test_a_token_from_the_future_breaks_the_law() -> None:
    with pytest.raises(LawBroken, match=r"provenance.*'the-one'.*version 6"):
        check(turn(ints(1), ints(2), version=6))


def test_another_policys_versions_are_not_this_trainers_business() -> None:
    check(turn(ints(1), ints(2), version=99, policy="judge"), turn(ints(1), ints(2), version=5))


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_log_prob_that_is_not_finite_is_refused_by_the_episodes_name(bad: float) -> None:
    with pytest.raises(RecordError, match="'the-one'"):
        check(turn(ints(1), ints(2), version=5, logprobs=np.array([bad])))


def test_an_advantage_that_is_not_finite_is_refused_by_the_episodes_name() -> None:
    with pytest.raises(RecordError, match="'the-one'"):
        check(turn(ints(1), ints(2), version=5), advantage=float("nan"))


@pytest.mark.parametrize(("context", "token"), [(1, 10), (10, 1), (-1, 1)])
def test_a_token_outside_the_vocabulary_is_refused(context: int, token: int) -> None:
    with pytest.raises(RecordError, match="vocabulary's size 10"):
        check(turn(ints(context), ints(token), version=5))
