"""Tasks that are rows of tables: Parquet files, and data sets of the `datasets` library.

Neither library is imported before it is needed; where it is missing, the error has its install command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, MissingExtra, short
from headrace.rollout.config import Columns, DatasetsTasks, ParquetTasks
from headrace.rollout.task_checks import Row

_BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
_EXTRA = "datasets"
_ROWS_AT_ONCE = 1024


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────────────


def parquet_files(config: ParquetTasks) -> list[Path]:
    path = Path(config.path)
    if path.is_dir():
        if files := sorted(path.glob("*.parquet")):
            return files
        raise ConfigError("a folder of tasks holds *.parquet files", config.path, "name the folder that holds them")
    if not path.is_file():
        raise ConfigError("a Parquet file of tasks exists", config.path, "correct tasks.path")
    return [path]


def check_parquet(config: ParquetTasks) -> None:
    """Raise the InputError of a file or column that is not there. Reads the files' footers alone."""
    for file in parquet_files(config):
        with _opened(file) as opened:
            check_columns(config, opened.schema_arrow.names, str(file))


def parquet_rows(config: ParquetTasks) -> Iterator[Row]:
    for file in parquet_files(config):
        number = 0
        with _opened(file) as opened:
            check_columns(config, opened.schema_arrow.names, str(file))
            for batch in opened.iter_batches(_ROWS_AT_ONCE):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}, row {number}", _without_gaps(value, config), config)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtra("pyarrow", _EXTRA) from None
    try:
        with parquet.ParquetFile(file) as opened:
            yield opened
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} is a Parquet file", short(error), "name another, or write it again") from error


# ── datasets ─────────────────────────────────────────────────────────────────────────────────────────────


def dataset_rows(config: DatasetsTasks) -> Iterator[Row]:
    dataset = _load(config)
    check_columns(config, list(dataset.column_names), config.path)
    for number, value in enumerate(dataset, start=1):
        yield Row(f"{config.path} ({config.split}), row {number}", _without_gaps(value, config), config)


def check_local(config: DatasetsTasks) -> None:
    """Raise ConfigError where `path` is neither there nor a possible name on the hub."""
    path = Path(config.path).expanduser()
    if path.is_file() and path.suffix not in _BUILDERS:
        kinds = ", ".join(_BUILDERS)
        raise ConfigError(f"a file that `datasets` loads is one of {kinds}", config.path, "convert it")
    if not path.exists() and not _HUB_NAME.fullmatch(config.path):
        raise ConfigError(
            'tasks.path is a folder or file that exists, or a name on the hub ("owner/name")',
            config.path,
            "correct tasks.path",
        )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _load(config: DatasetsTasks) -> Any:
    check_local(config)
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", _EXTRA) from None
    path = Path(config.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        # What `save_to_disk` has written.
        found = _loaded(config, lambda: datasets.load_from_disk(str(path)))
        if not isinstance(found, datasets.DatasetDict):
            return found
        if config.split not in found:
            raise _no_split(config, sorted(map(str, found)))
        return found[config.split]
    options: dict[str, Any] = {"split": config.split}
    if path.is_file():
        return _loaded(
            config, lambda: datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), **options)
        )
    where = str(path) if path.is_dir() else config.path
    if not path.is_dir():
        options["revision"] = config.revision
    return _loaded(config, lambda: datasets.load_dataset(where, config.subset, **options))


def _loaded(config: DatasetsTasks, load: Any) -> Any:
    """What `load` gives; every error of the library in our words."""
    try:
        return load()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if unknown := re.search(r"Unknown split .*Should be one of \[(.*)\]", said, re.DOTALL):
            raise _no_split(config, [name.strip("'\" ") for name in unknown[1].split(",")]) from error
        if _WITHOUT_HUB.search(_chain(error)):
            raise ConfigError(
                f"the hub can be reached to load {config.path!r}",
                said,
                "check the network, or download the data set and give its folder as tasks.path; a proxy or token "
                "of the shell is named in environment.pass_env",
            ) from error
        if "onfig name is missing" in said or "BuilderConfig" in said:
            raise ConfigError(
                f"{config.path} has the subset that tasks.subset names", said, "set tasks.subset to one of them"
            ) from error
        raise ConfigError(f"the library `datasets` can load {config.path!r}", said, "correct [tasks]") from error


_WITHOUT_HUB = re.compile(
    r"ConnectionError|ConnectError|OfflineMode|ConnectTimeout|MaxRetryError|Name or service not known|"
    r"LocalEntryNotFound|Couldn't reach|Network is unreachable"
)


def _chain(error: BaseException | None) -> str:
    """The error and those that led to it, by type and text."""
    said = ""
    while error is not None:
        said += f"{type(error).__name__}: {error}\n"
        error = error.__cause__ or error.__context__
    return said


def _no_split(config: DatasetsTasks, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{config.path} has the split that tasks.split names",
        config.split,
        f"set tasks.split to one of: {', '.join(known)}",
    )


# ── Both ─────────────────────────────────────────────────────────────────────────────────────────────────


def check_columns(config: Columns, known: list[str], where: str) -> None:
    """Raise ConfigError where a column that the configuration names is not there."""
    wanted = {
        "prompt_column": config.prompt_column,
        "answer_column": config.answer_column,
        "id_column": config.id_column,
    }
    for key, name in wanted.items():
        if name is not None and name not in known:
            raise ConfigError(
                f"{where} has the column that tasks.{key} names",
                name,
                f"set tasks.{key} to one of: {', '.join(known)}",
            )


def _without_gaps(row: dict[str, Any], config: Columns) -> dict[str, Any]:
    """A table gives every message all keys that any of them has; those without a value were never there."""
    prompt = row[config.prompt_column]
    if not isinstance(prompt, list):
        return row
    messages = [
        {key: value for key, value in one.items() if value is not None or key == "content"}
        if isinstance(one, dict)
        else one
        for one in prompt
    ]
    return {**row, config.prompt_column: messages}
