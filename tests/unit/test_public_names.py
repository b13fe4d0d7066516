"""Public names are a promise: a change here is a decision."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import headrace

NAMES = [
    "Attempt",
    "AttemptTurn",
    "Batch",
    "Completion",
    "Environment",
    "Episode",
    "EpisodeFailure",
    "Group",
    "HeadraceError",
    "Policy",
    "RunConfig",
    "Score",
    "Scorer",
    "Task",
    "Turn",
    "WeightVersion",
    "__version__",
    "load_config",
    "train",
]


def test_the_package_exports_these_names():
    assert sorted(headrace.__all__) == NAMES
    assert [name for name in NAMES if getattr(headrace, name) is None] == []


def test_importing_the_package_and_every_public_name_loads_no_torch():
    program = (
        "import headrace, sys; [getattr(headrace, n) for n in headrace.__all__]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_public_names_are_listed_and_typed():
    """What `dir` does not list no prompt completes; what a type checker does not find is Any to it."""
    assert [name for name in NAMES if name not in dir(headrace)] == []
    source = Path(headrace.__file__)
    assert (source.parent / "py.typed").is_file()
    typed = {
        alias.asname: f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed == headrace._LAZY
