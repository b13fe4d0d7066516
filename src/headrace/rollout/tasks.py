"""Where tasks come from, and the order in which a run goes through them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import ConfigError, MissingExtra, RecordError, short
from headrace.ipc import Failed
from headrace.records import Record, Task, encode, message
from headrace.references import resolve
from headrace.rollout.config import JsonlTasks, PythonTasks, ReasoningGymTasks, TaskConfig


@message
class TaskList(Record):
    tasks: tuple[Task, ...] = ()
    problem: Failed | None = None
    """Why there are none."""


def load_tasks(config: TaskConfig, limit: int | None = None) -> tuple[Task, ...]:
    """All tasks of a source, at most `limit`. Runs users' code: call it in a worker."""
    tasks = tuple(_task(task, index) for index, task in enumerate(islice(_source(config), limit)))
    if not tasks:
        raise ConfigError("a task source has at least one task", repr(config), "check the file or function")
    return tasks


def _source(config: TaskConfig) -> Iterator[Any]:
    if isinstance(config, JsonlTasks):
        return _jsonl(Path(config.path))
    if isinstance(config, ReasoningGymTasks):
        return _reasoning_gym(config)
    assert isinstance(config, PythonTasks)
    found = resolve(config.source)(**config.options)
    if not isinstance(found, Iterable):
        raise ConfigError(
            "a task function returns or yields tasks", type(found).__name__, f"change {config.source}"
        )
    return iter(found)


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                task = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    "each line of a task file is one JSON object", f"{path}:{number}: {short(error)}"
                ) from None
            if not isinstance(task, dict) or "prompt" not in task:
                raise ConfigError(
                    'each line of a task file has a "prompt"', f"{path}:{number}", "see docs/tasks.md"
                )
            yield task


def _reasoning_gym(config: ReasoningGymTasks) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError:
        raise MissingExtra("reasoning-gym", "reasoning-gym") from None
    try:
        dataset = reasoning_gym.create_dataset(config.dataset, size=config.size, seed=config.seed, **config.options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError("reasoning-gym can make this dataset", config.dataset, str(error)) from None
    recipe = {"dataset": config.dataset, "size": config.size, "seed": config.seed, "options": config.options}
    for index, entry in enumerate(dataset):
        # Not the entry itself: some verifiers tell tuples from lists, and a message does not.
        yield {
            "prompt": entry["question"],
            "answer": entry.get("answer"),
            "reasoning_gym": {**recipe, "index": index},
        }


def _task(value: Any, index: int) -> Task:
    """A task from what a source gives: a Task, or a mapping whose other keys become its data."""
    try:
        task = _as_task(value, index)
        # Whatever cannot travel is found out here, where its task can be named.
        encode(task)
    except (RecordError, RecursionError) as error:
        what = f"task {index}: {short(error.value if isinstance(error, RecordError) else error)}"
        remedy = "use text, numbers of up to 64 bits, lists and tables"
        raise ConfigError("a task holds what a message can carry", what, remedy) from error
    return task


def _as_task(value: Any, index: int) -> Task:
    if isinstance(value, Task):
        return value
    if not isinstance(value, dict) or "prompt" not in value:
        raise ConfigError('a task is an object with a "prompt"', repr(value)[:80], "see docs/tasks.md")
    data = {key: _plain(item) for key, item in value.items() if key not in ("id", "prompt", "answer")}
    answer = value.get("answer")
    return Task(
        id=str(value.get("id", index)),
        prompt=value["prompt"],
        answer=None if answer is None else str(answer),
        data=data,
    )


def _plain(value: Any) -> Any:
    """What a message can carry of a value: tuples become lists, unknown objects their text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


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
