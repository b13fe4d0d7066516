"""From what a task source gives to a Task: every fault is named with the place it stands at.

A prompt is text or chat messages; an answer becomes text; ids are told apart. Nothing here runs users' code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import xxhash

from headrace.errors import ConfigError, RecordError, brief, short
from headrace.records import Task, encode
from headrace.rollout.config import Columns

_MESSAGE = '{"role": "user", "content": "…"}'


class Row(NamedTuple):
    """One entry of a source, not yet looked at."""

    place: str
    """Where it stands: "tasks.jsonl, line 2"."""
    value: Any
    columns: Columns = Columns()


def checked_tasks(rows: Iterable[Row], answers_for: str | None = None) -> Iterator[Task]:
    """The tasks of a source. Raises ConfigError at the first that is none, or that has no answer where a scorer,
    `answers_for`, compares with it."""
    seen: dict[str, tuple[str, int]] = {}
    for index, row in enumerate(rows):
        task, content = _task(row, index)
        if task.answer is None and answers_for is not None:
            key = row.columns.answer_column or "answer"
            raise ConfigError(
                f'{row.place}: a task has an "{key}", which the scorer {answers_for} compares with',
                sorted(map(str, row.value)) if isinstance(row.value, Mapping) else None,
                "add it, say which column it is (answer_column), or name a scorer that needs none (scorer.source)",
            )
        before = seen.setdefault(task.id, (row.place, content))
        if before[1] != content:
            raise ConfigError(
                f"{row.place}: tasks of one id are the same task; another with the id "
                f"{json.dumps(short(task.id), ensure_ascii=False)} is {before[0]}",
                task.id,
                "give each an id of its own, or leave the ids out",
            )
        yield task


def _task(row: Row, index: int) -> tuple[Task, int]:
    """The task, and a digest of what it is beside its id."""
    try:
        task = _as_task(row, index)
        check_prompt(task.prompt, _named(row.place, row.value), row.columns.prompt_column)
        # Whatever cannot travel is found out here, where its task can be named.
        data = encode(task)
    except (RecordError, RecursionError) as error:
        what = short(error.value if isinstance(error, RecordError) else error)
        remedy = "use text, numbers of up to 64 bits, lists and tables"
        raise ConfigError(f"{row.place}: a task holds what a message can carry", what, remedy) from error
    return task, xxhash.xxh3_64_intdigest(bytes(data))


def _named(place: str, value: Any) -> str:
    """The place, with the id that a Task gave itself."""
    return f'{place} ("{short(value.id)}")' if isinstance(value, Task) else place


def _as_task(row: Row, index: int) -> Task:
    value, columns = row.value, row.columns
    if isinstance(value, Task):
        return value
    if not isinstance(value, Mapping):
        got = "null" if value is None else brief(value)
        raise ConfigError(f'{row.place}: a task has a "prompt"', got, 'write {"prompt": …, "answer": …}')
    if columns.prompt_column not in value:
        raise ConfigError(
            f'{row.place}: a task has a "{columns.prompt_column}"', sorted(map(str, value)), _rename(columns, value)
        )
    answer_key, id_key = columns.answer_column or "answer", columns.id_column or "id"
    for asked, key in ((columns.answer_column, answer_key), (columns.id_column, id_key)):
        if asked is not None and key not in value:
            has = sorted(map(str, value))
            raise ConfigError(f'{row.place}: a task has a "{key}"', has, "correct the name of that column")
    answer = value.get(answer_key)
    used = (columns.prompt_column, answer_key, id_key)
    return Task(
        id=str(value.get(id_key, index)),
        prompt=value[columns.prompt_column],
        answer=None if answer is None else str(answer),
        data={str(key): plain(item) for key, item in value.items() if key not in used},
    )


def _rename(columns: Columns, value: Mapping[Any, Any]) -> str:
    usual = [name for name in _USUAL_NAMES if name in value]
    if type(columns) is Columns:
        return 'write {"prompt": …, "answer": …}'
    return f'say which it is: prompt_column = "{usual[0] if usual else next(map(str, value), "…")}"'


_USUAL_NAMES = (
    "prompt",
    "question",
    "problem",
    "instruction",
    "input",
    "query",
    "messages",
    "conversations",
    "text",
)
"""What other data sets call it."""


def check_prompt(prompt: Any, place: str, key: str = "prompt") -> None:
    """Raise ConfigError where it is neither text nor messages that a chat template could have."""
    name = f'{place}: the "{key}"' if key != "prompt" else f"{place}: a prompt"
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError(f"{name} is not empty", prompt, "give the policy something to continue")
        return
    if not isinstance(prompt, list):
        got = "null" if prompt is None else brief(prompt)
        raise ConfigError(f"{name} is text or a list of messages", got, "write it as text, in quotation marks")
    if not prompt:
        raise ConfigError(f"{name} is not empty", "[]", f"give at least one message: [{_MESSAGE}]")
    for number, message in enumerate(prompt, start=1):
        _check_message(message, f"{name} that is a list holds messages, and number {number}")


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, Mapping):
        raise ConfigError(
            f"{name} is an object with a role", brief(message), f"write {_MESSAGE}, or the whole prompt as one text"
        )
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ConfigError(f'{name} has a "role" that is a text', brief(dict(message)), f"write {_MESSAGE}")
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and ("content" in message or len(message) > 1)):
        raise ConfigError(f'{name} has a "content" that is text', brief(dict(message)), f"write {_MESSAGE}")


def plain(value: Any) -> Any:
    """What a message can carry of a value: tuples become lists, unknown objects their text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
