"""What is wrong with tasks is told before the start, as far as can be known without loading a data set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.config.load import load_config
from headrace.errors import ConfigError, MissingExtra


def test_a_fault_far_down_a_file_is_found_before_the_start(project: Path) -> None:
    """`load_config` is what the command line calls before it starts anything."""
    lines = [json.dumps({"prompt": f"p{n}", "answer": "a"}) for n in range(2000)]
    lines[1765] = '{"prompt": []}'
    (project.parent / "tasks.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"line 1766: a prompt is not empty"):
        load_config(project)


def test_a_parquet_file_is_looked_at_before_the_start(project: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.table({"question": ["1 + 1?"]})
    pyarrow.parquet.write_table(table, project.parent / "t.parquet")
    ours = ['tasks={type = "parquet", path = "t.parquet"}']
    with pytest.raises(ConfigError, match=r"tasks.prompt_column"):
        load_config(project, ours)
    assert load_config(project, [*ours, "tasks.prompt_column=question"]).tasks.path == "t.parquet"  # type: ignore[union-attr]


def test_a_path_that_is_neither_there_nor_a_name_is_refused_before_the_start(project: Path) -> None:
    with pytest.raises(ConfigError, match="a folder or file that exists, or a name on the hub"):
        load_config(project, ['tasks={type = "datasets", path = "./no/such/folder"}'])


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow"), ("datasets", "datasets")])
def test_without_its_library_the_install_command_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    (project.parent / "t.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        load_config(project, [f'tasks={{type = "{kind}", path = "t.parquet"}}'])
    assert caught.value.remedy == "install it with: pip install 'headrace[datasets]'"
