"""The bound as pure functions: exhaustive on small cases, random on larger ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.staleness import NO_DEADLINE, Choice, admissible, choose, deadline, due


def test_the_deadline_is_the_engines_version_plus_the_bound():
    assert deadline(7, 2) == 9
    assert deadline(7, None) == NO_DEADLINE


@pytest.mark.parametrize(
    ("outstanding", "next_version", "last", "capacity", "expected"),
    [
        (0, 5, 5, None, True),  # synchronous: the engines have what the trainer has
        (0, 6, 5, None, False),  # …and wait while it trains
        (1, 5, 5, None, True),
        (2, 5, 5, None, False),  # a second batch would be trained at 6
        (2, 5, 6, None, True),
        (5, 5, 7, None, True),
        (6, 5, 7, None, False),
        (3, 5, 7, 3, False),  # the depth is reached
        (10**9, 5, NO_DEADLINE, None, True),
    ],
)
def test_admission_counts_whole_batches_ahead(outstanding, next_version, last, capacity, expected):
    assert admissible(outstanding, batch=2, next_version=next_version, deadline=last, capacity=capacity) is expected


def test_what_is_due_leaves_room_for_the_rest():
    # At version 0 with one group a batch: deadlines 1, 1, 2 need one of the first two now.
    assert due([1, 1, 2], batch=1, version=0) == [(2, 1), (3, 1)]
    assert due([0, 0, 3], batch=2, version=0) == [(2, 2)]
    assert due([5, 5], batch=2, version=0) == []


def test_first_finished_takes_who_finished_first_when_nothing_is_due():
    assert choose([9, 9, 9], [2, 0, 1], batch=2, version=0, window=None) == Choice(take=(1, 2))


def test_what_is_due_comes_before_what_finished_first():
    assert choose([0, 9, 9], [2, 0, 1], batch=2, version=0, window=None) == Choice(take=(0, 1))


def test_an_unfinished_group_that_is_due_is_late():
    assert choose([0, 9, 9], [None, 0, 1], batch=2, version=0, window=None) == Choice(late=(0,))


def test_no_more_groups_are_late_than_the_batch_lacks():
    late = choose([0] * 4 + [1] * 3, [0] + [None] * 6, batch=4, version=0, window=None)
    assert late == Choice(late=(1, 2, 3))


def test_the_window_hides_younger_groups():
    assert choose([9, 9, 9], [None, 0, 1], batch=2, version=0, window=2) == Choice()
    assert choose([9, 9, 9], [None, 0, 1], batch=2, version=0, window=3) == Choice(take=(1, 2))


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    bound=st.integers(0, 6),
    interval=st.integers(1, 7),
    window=st.sampled_from(["fifo", "windowed", "all"]),
    capacity=st.sampled_from([None, 1, 2]),
    drop=st.booleans(),
)
def test_no_schedule_whatever_breaks_the_bound_or_gets_stuck(seed, batch, bound, interval, window, capacity, drop):
    """A random adversary decides what finishes, fails and publishes when; the rules decide the rest."""
    dice = random.Random(seed)
    interval = min(interval, bound + 1)
    limit = {"fifo": batch, "windowed": batch + dice.randint(0, 5), "all": None}[window]
    room = None if capacity is None else capacity * batch
    trainer = engine = 0
    groups: list[list] = []  # [deadline, finish order or None]
    order = 0
    idle = 0
    while trainer < 15:
        moved = False
        while admissible(
            len(groups), batch=batch, next_version=trainer, deadline=deadline(engine, bound), capacity=room
        ):
            groups.append([deadline(engine, bound), None])
            moved = True
            if dice.random() < 0.3:
                break
        unfinished = [g for g in groups if g[1] is None]
        for group in dice.sample(unfinished, k=min(len(unfinished), dice.randint(0, batch))):
            moved = True
            if dice.random() < 0.1:
                groups.remove(group)
            else:
                group[1], order = order, order + 1
        choice = choose([g[0] for g in groups], [g[1] for g in groups], batch=batch, version=trainer, window=limit)
        if drop and choice.late and sum(g[1] is not None for g in groups) >= batch:
            for index in reversed(choice.late):
                del groups[index]
            moved = True
        elif choice.take:
            assert len(choice.take) == batch
            for index in reversed(choice.take):
                assert groups[index][0] >= trainer, "trained past its deadline"
                assert groups[index][1] is not None
                del groups[index]
            trainer += 1
            moved = True
        if trainer // interval * interval > engine and dice.random() < 0.7:
            engine = trainer // interval * interval
            moved = True
        idle = 0 if moved else idle + 1
        assert idle < 100, "stuck"
