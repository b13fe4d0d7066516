"""Public names are a promise: a change here is a decision."""

from __future__ import annotations

import subprocess
import sys

import headrace

NAMES = [
    "Attempt",
    "Batch",
    "Environment",
    "Episode",
    "Group",
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
