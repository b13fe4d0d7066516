"""Where tasks come from, and the order in which a run goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from headrace.errors import ConfigError
from headrace.ipc import Failed
from headrace.records import Record, Task, message
from headrace.rollout.config import TaskConfig
from headrace.rollout.task_checks import checked_tasks
from headrace.rollout.task_sources import place_of, rows


@message
class TaskList(Record):
    tasks: tuple[Task, ...] = ()
    problem: Failed | None = None
    """Why there are none."""


def load_tasks(config: TaskConfig, limit: int | None = None) -> tuple[Task, ...]:
    """All tasks of a source, at most `limit`. Runs users' code: call it in a worker.

    A fault is a ConfigError that names its file and line, or the function and the task's number.
    """
    tasks = tuple(checked_tasks(islice(rows(config), limit)))
    if not tasks:
        raise ConfigError("a task source has at least one task", place_of(config), "it has no task: fill it")
    return tasks


class TaskOrder:
    """An endless, reproducible walk through the tasks: every epoch a permutation of its own.

    `position` and `returned` are all there is to save. A task taken but lost to a crash is returned, and comes
    again before new ones.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0, returned: Sequence[int] = ()):
        self._tasks = tasks
        self._seed = seed
        self.position = position
        self.returned = list(returned)
        self._epoch = -1
        self._permutation = np.empty(0, np.int64)

    def take(self) -> tuple[int, Task]:
        """The next task and its place in the walk."""
        if self.returned:
            place = self.returned.pop(0)
        else:
            place = self.position
            self.position += 1
        return place, self._tasks[self._index(place)]

    def _index(self, place: int) -> int:
        epoch, offset = divmod(place, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))
        return int(self._permutation[offset])
