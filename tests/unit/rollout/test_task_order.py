from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.records import Task
from headrace.rollout.tasks import TaskOrder

TASKS = tuple(Task(id=str(i), prompt="") for i in range(7))


def walk(order: TaskOrder, count: int) -> list[tuple[int, str]]:
    return [(place, task.id) for place, task in (order.take() for _ in range(count))]


def test_every_epoch_is_a_permutation_of_its_own():
    ids = [task for _, task in walk(TaskOrder(TASKS, seed=1), 5 * len(TASKS))]
    epochs = [tuple(ids[first : first + 7]) for first in range(0, 35, 7)]
    assert all(sorted(epoch) == [task.id for task in TASKS] for epoch in epochs)
    assert len(set(epochs)) == 5


def test_places_count_up_and_a_seed_names_the_walk():
    one, same, other = (walk(TaskOrder(TASKS, seed), 21) for seed in (4, 4, 5))
    assert [place for place, _ in one] == list(range(21))
    assert one == same
    assert one != other


@given(seed=st.integers(0, 99), taken=st.integers(0, 30), lost=st.sets(st.integers(0, 29)))
def test_a_resumed_walk_gives_back_what_was_lost_and_then_goes_on_the_same(seed, taken, lost):
    whole = walk(TaskOrder(TASKS, seed), 60)
    returned = sorted(place for place in lost if place < taken)
    resumed = walk(TaskOrder(TASKS, seed, position=taken, returned=returned), 30)
    assert resumed[: len(returned)] == [whole[place] for place in returned]
    assert resumed[len(returned) :] == whole[taken : taken + 30 - len(returned)]


def test_position_and_returned_are_all_there_is_to_save():
    order = TaskOrder(TASKS, seed=2, position=9, returned=[3, 8])
    assert walk(order, 1)[0][0] == 3
    assert (order.position, order.returned) == (9, [8])
    copy = TaskOrder(TASKS, seed=2, position=order.position, returned=order.returned)
    assert walk(copy, 10) == walk(order, 10)
    assert (order.position, order.returned) == (18, [])
