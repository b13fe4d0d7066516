"""Code of a notebook's cells becomes a file that says the same; what cannot be made again is refused by name."""

from __future__ import annotations

import collections
import math
import os.path
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.definitions import Definitions
from headrace.errors import ConfigError
from headrace.references import resolve


class Notebook:
    """A session as IPython leaves it: `__main__` without a file, and what was executed in `In`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.main = types.ModuleType("__main__")
        self.main.In = [""]  # type: ignore[attr-defined]

    def cell(self, text: str) -> None:
        self.main.In.append(text)  # type: ignore[attr-defined]
        exec(compile(text, f"/nowhere/ipykernel_1/{len(self.main.In)}.py", "exec"), vars(self.main))  # type: ignore[attr-defined]

    def file(self, name: str) -> str:
        """The file that the thing of this name becomes."""
        made = Definitions(self.folder)
        made.reference(vars(self.main)[name])
        [text] = made.files.values()
        return text

    def found_again(self, name: str) -> Any:
        """What a worker finds by the reference."""
        made = Definitions(self.folder)
        reference = made.reference(vars(self.main)[name])
        for path, text in made.files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return resolve(reference)

    def refusal(self, name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            self.file(name)
        return str(caught.value)


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    found = Notebook(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", found.main)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return found


def test_a_function_brings_the_imports_values_and_functions_of_other_cells(notebook: Notebook) -> None:
    notebook.cell(
        "import math, re\nimport os.path\nfrom collections import Counter as Count\nunused = open(0, closefd=False)"
    )
    notebook.cell(
        "WORTH = {'b': 2, 'a': (1,)}\nWORD = re.compile(r'w(\\d)', re.I)\nSEEN = {'y', 'x'}\nTOP: int = 9"
    )
    notebook.cell("def helper(text):\n    return Count(WORD.findall(text)), twice(3)")
    notebook.cell("def twice(x):\n    return helper('') if x < 0 else 2 * x")
    notebook.cell(
        "def score(text, base=TOP):\n    return [helper(text), WORTH, SEEN, math.pi, os.path.join('a', 'b'), base]"
    )
    found = notebook.found_again("score")
    assert found("w1 W1 w2") == [
        (collections.Counter({"1": 2, "2": 1}), 6),
        {"b": 2, "a": (1,)},
        {"x", "y"},
        math.pi,
        os.path.join("a", "b"),
        9,
    ]
    text = notebook.file("score")
    assert "unused" not in text
    assert "SEEN = {'x', 'y'}" in text


def test_a_class_brings_its_bases_decorators_and_fields(notebook: Notebook) -> None:
    notebook.cell("import dataclasses\nclass Base:\n    def half(self, x): return x / self.by")
    notebook.cell("def named(kind):\n    kind.name = 'it'\n    return kind")
    notebook.cell(
        "@named\n@dataclasses.dataclass\nclass Scorer(Base):\n    by: int = 2\n"
        "    def score(self, x):\n        return self.half(x)"
    )
    kind = notebook.found_again("Scorer")
    assert (kind(by=4).score(2), kind().by, kind.name) == (0.5, 2, "it")


def test_an_object_is_made_again_by_the_statement_that_made_it(notebook: Notebook) -> None:
    notebook.cell("class Table:\n    def __init__(self, n): self.n = n\nsize = 4")
    notebook.cell("table = Table(size)\ndef score(x):\n    return table.n * x")
    assert notebook.found_again("score")(2) == 8


def test_the_latest_definition_counts_and_the_name_of_the_file_tells_them_apart(notebook: Notebook) -> None:
    notebook.cell("def score(x):\n    return rate\nrate = 1")
    first = Definitions(notebook.folder).reference(vars(notebook.main)["score"])
    assert first == Definitions(notebook.folder).reference(vars(notebook.main)["score"])
    notebook.cell("rate = 2")
    second = Definitions(notebook.folder).reference(vars(notebook.main)["score"])
    assert notebook.found_again("score")(0) == 2
    notebook.cell("def score(x):\n    return rate + 1")
    assert notebook.found_again("score")(0) == 3
    third = Definitions(notebook.folder).reference(vars(notebook.main)["score"])
    assert len({first, second, third}) == 3


def test_annotations_are_what_the_session_makes_of_them(notebook: Notebook) -> None:
    notebook.cell("from __future__ import annotations")
    notebook.cell("def score(task: NotKnownYet) -> float:\n    return 1.0")
    assert notebook.found_again("score").__annotations__ == {"task": "NotKnownYet", "return": "float"}


def test_what_cannot_be_made_again_is_refused_by_its_name(notebook: Notebook) -> None:
    notebook.cell("handles = []\nfor name in ('a',):\n    handle = open(0, closefd=False)\nbig = 'x' * 100_000")
    notebook.cell("big += ''\ndef score(x):\n    return handle\ndef weigh(x):\n    return big")
    assert "score runs in worker processes, where handle, which it uses, cannot be made again" in notebook.refusal(
        "score"
    )
    assert "where big, which it uses, cannot be made again" in notebook.refusal("weigh")


@pytest.mark.parametrize("make", [lambda: lambda task, attempt: 1.0, lambda: Path(), lambda: 7])
def test_what_has_no_name_is_refused(notebook: Notebook, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="define it at the top level of a module"):
        Definitions(notebook.folder).reference(make())


def test_code_of_which_no_source_is_left_is_refused(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\nfrom headrace.definitions import Definitions\nclass Scorer:\n"
        "    def score(self, task, attempt): return 1.0\nDefinitions(Path('x')).reference(Scorer)"
    )
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, cwd=tmp_path)
    assert "the source of Scorer can be found" in done.stderr
    assert "put the code into a file" in done.stderr


def test_code_of_modules_and_files_is_referred_to_where_it_is(notebook: Notebook) -> None:
    made = Definitions(notebook.folder)
    assert made.reference(math.sqrt) == "math:sqrt"
    assert made.reference(collections.Counter) == "collections:Counter"
    assert made.reference("mine.py:score") == "mine.py:score"
    assert made.files == {}
