"""A reference leads to one object, or the error says what there is instead."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from headrace.errors import BadReference
from headrace.references import module_name, resolve


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def refusal(reference: str) -> BadReference:
    with pytest.raises(BadReference) as caught:
        resolve(reference)
    return caught.value


def test_a_module_reference_leads_to_the_object() -> None:
    assert resolve("collections:OrderedDict") is OrderedDict
    assert resolve("collections:OrderedDict.fromkeys") == OrderedDict.fromkeys


def test_a_file_reference_is_relative_to_the_current_directory_and_loaded_once(here: Path) -> None:
    (here / "envs").mkdir()
    (here / "envs" / "helper.py").write_text("FACTOR = 3\n")
    (here / "envs" / "mine.py").write_text("from helper import FACTOR\ndef triple(x):\n    return FACTOR * x\n")
    function = resolve("envs/mine.py:triple")
    assert function(5) == 15  # type: ignore[operator]
    assert resolve(str(here / "envs" / "mine.py") + ":triple") is function


def test_objects_of_a_files_classes_can_be_pickled(here: Path) -> None:
    (here / "point.py").write_text("class Point:\n    def __init__(self, x):\n        self.x = x\n")
    point = resolve("point.py:Point")(7)  # type: ignore[operator]
    assert pickle.loads(pickle.dumps(point)).x == 7
    assert type(point).__module__ == module_name(here / "point.py")


def test_a_module_of_the_current_directory_is_found(here: Path) -> None:
    (here / "module_in_this_directory.py").write_text("VALUE = 11\n")
    assert resolve("module_in_this_directory:VALUE") == 11


@pytest.mark.parametrize("reference", ["module", "module:", ":Name", ""])
def test_a_reference_without_both_parts_is_refused(reference: str) -> None:
    assert refusal(reference).rule == 'a reference is "module:Name" or "file.py:Name"'


def test_a_missing_file_is_refused_with_where_it_was_looked_for(here: Path) -> None:
    (here / "scorer.py").write_text("")
    error = refusal("scorers.py:Score")
    assert error.value == "scorers.py"
    assert str(here / "scorers.py") in (error.remedy or "")
    assert "did you mean 'scorer.py'?" in (error.remedy or "")


def test_a_missing_module_is_refused_with_its_nearest_neighbour() -> None:
    assert refusal("no_such_package.inner:Name").value == "no_such_package"
    error = refusal("headrace.scoring.rule:ExactMatch")
    assert error.value == "headrace.scoring.rule"
    assert error.remedy == "did you mean 'headrace.scoring.rules'?"


def test_a_missing_name_is_refused_with_the_nearest_one(here: Path) -> None:
    (here / "s.py").write_text("import os\ndef reward(a):\n    pass\nLIMIT = 3\n")
    assert refusal("s.py:rewards").remedy == "did you mean 'reward'?"
    assert refusal("s.py:zork").remedy == "it defines reward"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_thing_at_all", "ModuleNotFoundError: No module named 'no_such_thing_at_all'"),
        ("x = 1\nraise ValueError('not today')", "ValueError: not today"),
        ("def broken(:\n    pass", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_an_error_inside_the_users_file_is_shown_with_its_place(here: Path, code: str, words: str) -> None:
    (here / "broken.py").write_text(code)
    error = refusal("broken.py:Name")
    assert error.rule == "broken.py can be imported"
    assert words in str(error.value)
    assert "line" in str(error.value)
    assert module_name(here / "broken.py") not in sys.modules


def test_an_import_error_inside_a_module_is_not_mistaken_for_a_missing_module(here: Path) -> None:
    (here / "needs_something.py").write_text("import missing_dependency_of_mine\n")
    error = refusal("needs_something:Name")
    assert error.rule == "needs_something can be imported"
    assert "missing_dependency_of_mine" in str(error.value)
