"""Real starts that are refused for their input: exit code 2, the place of the fault, and nothing left behind."""

from __future__ import annotations

import pytest
from integration_project import USER_CODE, Project

REFUSED = {
    "a task of a function": (
        "def tasks():\n    yield {'prompt': 'w1'}\n    yield {'id': 'b', 'prompt': 5}\n",
        [],
        ["user.py:tasks, task 2: a prompt is text or a list of messages (got 5)"],
    ),
    "a function that raises": (
        "def tasks():\n    yield {'prompt': 'w1'}\n    raise KeyError('gold')\n",
        [],
        ["user.py:tasks gives its tasks without raising, and its task 2 raised", "KeyError", "user.py, line"],
    ),
    "a function that ends its process": (
        "import os\ndef tasks():\n    os._exit(9)\n",
        [],
        ["tasks are read within environment.timeout_s, by a process that lives on", "environment_crash"],
    ),
    "a scorer that cannot be made": (
        "class Scorer:\n    def __init__(self):\n        open('table.json')\n"
        "    def score(self, task, attempt):\n        return 1.0\n",
        ["--set", "scorer.source=user.py:Scorer"],
        ["scorer: user.py:Scorer can be made from scorer.options", "table.json", "user.py, line"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_worker_finds_at_the_start_is_told_and_nothing_is_left(project: Project, case: str) -> None:
    code, words, says = REFUSED[case]
    (project.path / "user.py").write_text(USER_CODE + "\n" + code)
    done = project.headrace("train", "config.toml", *words)
    assert done.returncode == 2, done.stderr
    for text in says:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project.path / "runs").exists()


def test_a_folder_that_was_there_stays_as_it_was(project: Project) -> None:
    (project.path / "user.py").write_text(USER_CODE + "\ndef tasks():\n    yield {'prompt': []}\n")
    (project.path / "mine").mkdir()
    done = project.headrace("train", "config.toml", "--run", "mine/deep")
    assert done.returncode == 2, done.stderr
    assert list((project.path / "mine").iterdir()) == []
