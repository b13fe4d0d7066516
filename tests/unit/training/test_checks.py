from __future__ import annotations

import msgspec
import numpy as np
import pytest
from training_builders import batch_of, episode, ints, turn

from headrace.errors import LawBroken, RecordError
from headrace.records import Turn
from headrace.training.checks import check_batch, flaw


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


def test_a_support_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RecordError, match="vocabulary's size 10"):
        check(turn(ints(1), ints(2), version=5, support=[[2, 10]]))


def test_columns_that_do_not_fit_together_are_refused_by_the_episodes_name() -> None:
    with pytest.raises(RecordError, match=r"one entry per sampled token, here \(2,\); in episode 'the-one'"):
        check(turn(ints(1), ints(2, 3), version=5, logprobs=np.array([-0.5])))


@pytest.mark.parametrize(("context", "token"), [(1, 10), (10, 1), (-1, 1)])
def test_a_token_outside_the_vocabulary_is_refused(context: int, token: int) -> None:
    with pytest.raises(RecordError, match="vocabulary's size 10"):
        check(turn(ints(context), ints(token), version=5))


@pytest.mark.parametrize(("context", "token"), [(1, 8), (8, 1)])
def test_a_token_that_the_teacher_does_not_know_is_refused(context: int, token: int) -> None:
    known = batch_of([episode(turn(ints(7), ints(7)), id="the-one")], [1.0])
    check_batch(known, version=0, max_staleness=None, vocab_size=10, teacher_size=8)
    other = batch_of([episode(turn(ints(context), ints(token)), id="the-one")], [1.0])
    check_batch(other, version=0, max_staleness=None, vocab_size=10)
    with pytest.raises(RecordError, match=r"teacher's vocabulary's size 8; in 'the-one'.*got 8.*name a teacher"):
        check_batch(other, version=0, max_staleness=None, vocab_size=10, teacher_size=8)


GOOD = turn(ints(1), ints(2, 3), version=np.array([3, 5]), logprobs=np.array([-0.1, 1e-5]))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (turn(ints(1), ints(2), logprobs=np.array([np.nan])), "a log-prob is not finite"),
        (turn(ints(1), ints(2), logprobs=np.array([-np.inf])), "a log-prob is not finite"),
        (turn(ints(1), ints(2), logprobs=np.array([0.5])), "a log-prob is 0.5, more than log 1"),
        (
            turn(ints(1), ints(2), logprobs=np.array([-1e30])),
            "a log-prob is -1e+30, of a token that is never sampled",
        ),
        (
            turn(ints(1), ints(2, 3), logprobs=np.array([-0.5])),
            "a turn's columns have one entry per sampled token, here (2,) "
            "(got {'logprobs': (1,), 'versions': (2,)})",
        ),
        (turn(ints(), ints(2)), "it has no context"),
        (turn(ints(1), ints(2), parent=2), "it continues turn 2, which is not before it"),
        (turn(ints(1), ints(99)), "token ids 99 to 99, of a vocabulary of 50 tokens"),
        (turn(ints(-1), ints(9)), "token ids -1 to -1, of a vocabulary of 50 tokens"),
        (turn(ints(1), ints(2), support=[[2, 50]]), "support ids 2 to 50, of a vocabulary of 50 tokens"),
        (turn(ints(1), ints(2), support=[[2, -3]]), "support ids -3 to 2, of a vocabulary of 50 tokens"),
        (
            turn(ints(1), ints(2), temperature=float("nan")),
            "a temperature is 0 or lies in [1e-06, 1e+06] (got nan)",
        ),
        (
            turn(ints(1), ints(2), support=[[]], temperature=0.0),
            "token 2, its 1., is not within its recorded support",
        ),
        (turn(ints(1), ints(2, 3), version=np.array([5, 6])), "versions 5 to 6, and the newest is 5"),
        (turn(ints(1), ints(2), version=-1), "versions -1 to -1, and the newest is 5"),
        (
            turn(ints(1), ints(2, 3, 4), support=[[2, 9], [4, 5], [4]]),
            "token 3, its 2., is not within its recorded support",
        ),
    ],
)
def test_a_turn_that_cannot_be_right_is_seen_at_the_door(bad: Turn, why: str) -> None:
    one = episode(GOOD, turn(ints(1), ints(9), version=77, policy="judge"), bad, id="the-one")
    assert flaw(one, newest=5, vocabulary=50) == f"turn 2 of episode 'the-one', sampled by an engine: {why}"


def test_a_support_that_is_missing_is_seen_at_the_door() -> None:
    bare = msgspec.structs.replace(turn(ints(1), ints(2), support=[[2]]), support=None)
    found = flaw(episode(bare), newest=5) or ""
    assert found.endswith("its sampling truncates, and no support is recorded")


@pytest.mark.parametrize("support", [[[2, 9], [7, 3]], [[], [3]], [[2], []]])
def test_what_is_in_order_passes(support: list[list[int]]) -> None:
    rows = turn(ints(1), ints(2, 3), version=5, support=support)
    assert flaw(episode(GOOD, rows, turn(ints(1), ints())), newest=5) is None
