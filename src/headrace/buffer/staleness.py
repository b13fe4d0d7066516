"""The staleness bound, as pure functions of plain data. `docs/staleness.md` derives it.

Words. Training steps are numbered by the version they consume: the batch trained at version t makes t + 1. The
trainer takes `batch` groups a step. A group admitted while the slowest engine serves version e holds no token
older than e, so it may be trained at versions up to its deadline e + bound. Engines never go back, so deadlines
never fall in the order of admission, which is the order of every sequence here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

NO_DEADLINE = 1 << 62


def deadline(engine_version: int, bound: int | None) -> int:
    """The last version at which a group admitted now may be trained."""
    return NO_DEADLINE if bound is None else engine_version + bound


def admissible(outstanding: int, *, batch: int, next_version: int, deadline: int, capacity: int | None) -> bool:
    """Whether one more group, behind `outstanding` others, is sure to be trained by its deadline.

    With `outstanding` groups before it, it is trained at version next_version + outstanding // batch at the
    latest, as long as every batch honours `due`.
    """
    if capacity is not None and outstanding >= capacity:
        return False
    return next_version + outstanding // batch <= deadline


def due(deadlines: Sequence[int], *, batch: int, version: int) -> list[tuple[int, int]]:
    """What the batch trained at `version` must contain: pairs (n, k), at least k of the n oldest groups.

    Groups with deadline d leave in the d − version + 1 batches from this one on, so all but batch × (d − version)
    of them leave now.
    """
    needs, oldest = [], 0
    for last, same in groupby(deadlines):
        oldest += sum(1 for _ in same)
        needed = oldest - batch * max(0, last - version)
        if needed > 0:
            needs.append((oldest, needed))
    return needs


@dataclass(frozen=True)
class Choice:
    """Which outstanding groups make the next batch, or what it waits for. Numbers are places in the order."""

    take: tuple[int, ...] = ()
    """A whole batch, or nothing."""
    late: tuple[int, ...] = ()
    """Unfinished groups that the bound wants in this batch: wait for them, or drop them."""


def choose(
    deadlines: Sequence[int],
    finished: Sequence[int | None],
    *,
    batch: int,
    version: int,
    window: int | None,
) -> Choice:
    """Choose the batch trained at `version`.

    `finished[i]` tells the order in which groups finished, None while one has not. Of the oldest `window` groups,
    those the bound wants come first, then those that finished first.
    """
    limit = len(deadlines) if window is None else min(window, len(deadlines))
    rank = {i: order for i, order in enumerate(finished[:limit]) if order is not None}
    by_finish = sorted(rank, key=lambda i: rank[i])
    taken: set[int] = set()
    late: set[int] = set()
    for oldest, needed in due(deadlines, batch=batch, version=version):
        short = needed - sum(1 for i in taken if i < oldest)
        ready = [i for i in by_finish if i < oldest and i not in taken]
        taken.update(ready[: max(0, short)])
        if short > len(ready):
            unfinished = [i for i in range(oldest) if finished[i] is None and i not in late]
            late.update(unfinished[: max(0, short - len(ready) - len(late))])
    if late:
        return Choice(late=tuple(sorted(late)))
    for i in by_finish:
        if len(taken) >= batch:
            break
        taken.add(i)
    return Choice(take=tuple(sorted(taken))) if len(taken) == batch else Choice()
