"""Where tasks come from: one function for each kind of source, which yields its rows with their places."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, InputError, MissingExtra, short
from headrace.references import check_call, resolve, told
from headrace.rollout.config import (
    DatasetsTasks,
    JsonlTasks,
    ParquetTasks,
    PythonTasks,
    ReasoningGymTasks,
    TaskConfig,
)
from headrace.rollout.task_checks import Row
from headrace.rollout.task_tables import dataset_rows, parquet_rows


def rows(config: TaskConfig) -> Iterator[Row]:
    """What a source holds, in order, read as it is asked for."""
    if isinstance(config, JsonlTasks):
        return jsonl_rows(config)
    if isinstance(config, ParquetTasks):
        return parquet_rows(config)
    if isinstance(config, DatasetsTasks):
        return dataset_rows(config)
    if isinstance(config, ReasoningGymTasks):
        return _reasoning_gym(config)
    return _python(config)


def place_of(config: TaskConfig) -> str:
    """The source in a word or two."""
    if isinstance(config, PythonTasks):
        return config.source
    return config.dataset if isinstance(config, ReasoningGymTasks) else config.path


def jsonl_rows(config: JsonlTasks, most_bytes: int | None = None) -> Iterator[Row]:
    """The file's lines that are not blank; only those that begin in its first `most_bytes`.

    A byte-order mark at its beginning, as editors on Windows write it, is no part of the first line.
    """
    path, begin = Path(config.path), 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if most_bytes is not None and begin >= most_bytes:
                return
            begin += len(line)
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                place = f"{config.path}, line {number}"
                yield Row(place, _parsed(line, place), config)


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def _parsed(line: bytes, place: str) -> Any:
    if line.startswith(b"PAR1"):
        raise ConfigError(f"{place}: a line is one JSON object", "a Parquet file", 'write type = "parquet"')
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.object[error.start]:#04x} at {error.start + 1} of the line"
        raise ConfigError(f"{place}: a task file is UTF-8 text", what, "save the file as UTF-8") from None
    try:
        return json.loads(text.rstrip())
    # A ValueError that is no JSONDecodeError is an integer of thousands of digits.
    except (ValueError, RecursionError) as error:
        begin = text.strip()
        remedy = "correct the line"
        if begin.startswith("["):
            remedy = "write one object a line, without the brackets and commas around them"
        elif not begin.startswith("{"):
            remedy = 'write {"prompt": …, "answer": …}; CSV is read by type = "datasets"'
        why = f"{error.msg} at {error.colno}" if isinstance(error, json.JSONDecodeError) else short(error)
        got = f"{begin[:60]}: {why}"
        raise ConfigError(f"{place}: a line is one JSON object", got, remedy) from None


def _reasoning_gym(config: ReasoningGymTasks) -> Iterator[Row]:
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
        task = {
            "prompt": entry["question"],
            "answer": entry.get("answer"),
            "reasoning_gym": {**recipe, "index": index},
        }
        yield Row(f"{config.dataset}, task {index + 1}", task)


def _python(config: PythonTasks) -> Iterator[Row]:
    function = resolve(config.source)
    check_call(function, (), config.options, config.source, "tasks.options")
    try:
        found = function(**config.options)
    except InputError:
        raise
    except Exception as error:
        raise _raised(config, error, 1) from error
    if inspect.iscoroutine(found):
        found.close()
    if isinstance(found, str | bytes | dict) or not isinstance(found, Iterable):
        got = "None" if found is None else type(found).__name__
        remedy = f"let {config.source} yield tasks, or return a list of them"
        raise ConfigError("a task function returns or yields tasks", got, remedy)
    number, values = 0, iter(found)
    while True:
        number += 1
        try:
            value = next(values)
        except StopIteration:
            return
        except InputError:
            raise
        except Exception as error:
            raise _raised(config, error, number) from error
        yield Row(f"{config.source}, task {number}", value)


def _raised(config: PythonTasks, error: Exception, number: int) -> ConfigError:
    return ConfigError(
        f"{config.source} gives its tasks without raising, and its task {number} raised",
        told(error),
        "correct the function",
    )
