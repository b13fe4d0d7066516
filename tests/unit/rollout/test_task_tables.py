"""Tasks from Parquet files and from data sets, by the real libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.rollout.config import DatasetsTasks, ParquetTasks
from headrace.rollout.tasks import load_tasks

COLUMNS: dict[str, list[Any]] = {
    "question": ["1 + 1?", "2 + 2?", "3 + 3?"],
    "solution": [2, 4, 6],
    "level": ["easy", "easy", "hard"],
}
NAMED = {"prompt_column": "question", "answer_column": "solution"}


def parquet(file: Path, columns: dict[str, list[Any]] = COLUMNS) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


def refusal(config: ParquetTasks | DatasetsTasks) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_tasks(config)
    return caught.value


def seen(config: ParquetTasks | DatasetsTasks, limit: int | None = None) -> list[tuple[Any, ...]]:
    return [(task.id, task.prompt, task.answer, task.data) for task in load_tasks(config, limit)]


WHOLE = [
    ("0", "1 + 1?", "2", {"level": "easy"}),
    ("1", "2 + 2?", "4", {"level": "easy"}),
    ("2", "3 + 3?", "6", {"level": "hard"}),
]


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────────────


def test_each_row_of_a_parquet_file_is_a_task(tmp_path: Path) -> None:
    file = parquet(tmp_path / "tasks.parquet")
    assert seen(ParquetTasks(path=str(file), **NAMED)) == WHOLE
    assert seen(ParquetTasks(path=str(file), **NAMED), limit=1) == WHOLE[:1]


def test_the_files_of_a_folder_are_read_by_name(tmp_path: Path) -> None:
    for number in (1, 0):
        parquet(tmp_path / f"part-{number}.parquet", {"prompt": [f"p{number}"]})
    assert [prompt for _, prompt, *_ in seen(ParquetTasks(path=str(tmp_path)))] == ["p0", "p1"]


def test_messages_of_a_table_have_only_the_keys_that_they_were_written_with(tmp_path: Path) -> None:
    """A column of structures gives each message all keys of all of them, without values."""
    prompts = [[{"role": "user", "content": "a"}], [{"role": "tool", "content": None, "name": "add"}]]
    config = ParquetTasks(path=str(parquet(tmp_path / "t.parquet", {"prompt": prompts})))
    assert [prompt for _, prompt, *_ in seen(config)] == prompts


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    error = refusal(ParquetTasks(path=str(parquet(tmp_path / "t.parquet"))))
    assert error.rule == f"{tmp_path}/t.parquet has the column that tasks.prompt_column names"
    assert (error.value, error.remedy) == (
        "prompt",
        "set tasks.prompt_column to one of: question, solution, level",
    )


def test_a_row_whose_prompt_is_missing_is_named(tmp_path: Path) -> None:
    file = parquet(tmp_path / "t.parquet", {"prompt": ["a", None]})
    error = refusal(ParquetTasks(path=str(file)))
    assert (error.rule, error.value) == (f"{file}, row 2: a prompt is text or a list of messages", "null")


def test_what_is_no_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("prompt,answer\n")
    assert refusal(ParquetTasks(path=f"{tmp_path}/t.parquet")).rule == f"{tmp_path}/t.parquet is a Parquet file"
    assert "exists" in refusal(ParquetTasks(path=f"{tmp_path}/none.parquet")).rule
    (tmp_path / "folder").mkdir()
    assert "holds *.parquet files" in refusal(ParquetTasks(path=f"{tmp_path}/folder")).rule


# ── datasets ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_what_save_to_disk_wrote_is_read_with_its_splits(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}).save_to_disk(tmp_path / "saved")
    assert seen(DatasetsTasks(path=f"{tmp_path}/saved", **NAMED)) == WHOLE
    error = refusal(DatasetsTasks(path=f"{tmp_path}/saved", split="test", **NAMED))
    assert (error.rule, error.value) == (f"{tmp_path}/saved has the split that tasks.split names", "test")
    assert error.remedy == "set tasks.split to one of: train"
    datasets.Dataset.from_dict(COLUMNS).save_to_disk(tmp_path / "one")
    assert seen(DatasetsTasks(path=f"{tmp_path}/one", **NAMED)) == WHOLE


def test_a_folder_of_data_files_has_splits_and_parts_of_them(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data" / "train.parquet")
    config = DatasetsTasks(path=f"{tmp_path}/data", split="train[:2]", **NAMED)
    assert seen(config) == WHOLE[:2]
    error = refusal(DatasetsTasks(path=f"{tmp_path}/data", split="tests", **NAMED))
    assert error.remedy == "set tasks.split to one of: train"


def test_a_csv_file_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("question,solution\n1 + 1?,2\n")
    assert seen(DatasetsTasks(path=f"{tmp_path}/t.csv", **NAMED)) == [("0", "1 + 1?", "2", {})]
    error = refusal(DatasetsTasks(path=f"{tmp_path}/t.csv"))
    assert error.remedy == "set tasks.prompt_column to one of: question, solution"


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    error = refusal(DatasetsTasks(path="openai/gsm8k", subset="main"))
    assert error.rule == "the hub can be reached to load 'openai/gsm8k'"
    assert "download the data set and give its folder" in str(error.remedy)
