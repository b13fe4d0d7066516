"""`make test-gpu` itself: what it runs, what it counts and what it keeps."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "gpu"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def written(folder: Path, **files: str) -> list[Path]:
    paths = []
    for name, text in files.items():
        paths.append(folder / f"{name}.py")
        paths[-1].write_text(text)
    return paths


def counts(rows: list[dict[str, Any]]) -> dict[str, tuple[int, int, int]]:
    return {row["file"]: (row["passed"], row["failed"], row["skipped"]) for row in rows}


def test_every_file_is_in_one_lane_of_one_half(run):
    assigned = [name for lanes in run.HALVES.values() for lane in lanes for name in lane]
    assert sorted(assigned) == sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_outcomes_of_all_kinds_are_counted_by_file(run, tmp_path):
    lane = written(
        tmp_path,
        test_mixed="import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('no')\n",
        test_broken="import nothing_of_that_name\n",
        test_edges=(
            "import pytest\n@pytest.fixture\ndef before(): assert 0\n"
            "@pytest.fixture\ndef after():\n yield\n assert 0\n"
            "def test_a(before): pass\ndef test_b(after): pass\ndef test_c(): pass\n"
        ),
        test_empty="",
    )
    beside = written(tmp_path, test_beside="def test_a(): pass\n")
    rows = run.run_lanes([lane, beside], 120.0)
    assert counts(rows) == {
        "test_mixed.py": (1, 1, 1),
        "test_broken.py": (0, 1, 0),
        "test_edges.py": (1, 2, 0),
        "test_empty.py": (0, 1, 0),
        "test_beside.py": (1, 0, 0),
    }
    assert run.total(rows) == {"passed": 3, "failed": 5, "skipped": 1}


def test_when_the_time_is_up_what_has_no_outcome_failed(run, tmp_path):
    hangs = "import time\ntime.sleep(600)\ndef test_a(): pass\n"
    lane = written(tmp_path, test_hangs=hangs, test_after="def test_a(): pass\n")
    assert counts(run.run_lanes([lane], 0.0)) == {"test_hangs.py": (0, 1, 0), "test_after.py": (0, 1, 0)}


def test_a_process_that_dies_fails_what_it_had_not_run(run, tmp_path):
    lane = written(
        tmp_path, test_dies="import os\ndef test_a(): pass\ndef test_b(): os.abort()\ndef test_c(): pass\n"
    )
    assert counts(run.run_lanes([lane], 120.0)) == {"test_dies.py": (1, 2, 0)}


def half(number: int, failed: int, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    ours = {"half": number, "passed": 10, "failed": failed, "skipped": 1, "seconds": seconds}
    row = {"file": f"test_{number}.py", "passed": 10, "failed": failed, "skipped": 1, "seconds": 5.0}
    return ours, [row]


def test_halves_of_one_commit_are_summed_and_have_figures_together(run):
    told = {"bench": "tests_gpu", "card": "NVIDIA H200", "commit": "c0ffee"}
    first = run.merged({}, told, *half(1, 2, 400.0))
    assert (first["passed"], first["failed"], first["figures"]) == (10, 2, {})
    both = run.merged(first, told, *half(2, 1, 500.5))
    assert (both["card"], both["commit"]) == ("NVIDIA H200", "c0ffee")
    assert both["figures"] == {
        "gpu_tests_passed": 20,
        "gpu_tests_failed": 3,
        "gpu_tests_skipped": 2,
        "gpu_tests_seconds": 900.5,
    }
    assert [(row["part"], row["half"]) for row in both["rows"]] == [
        ("halves", 1),
        ("halves", 2),
        ("files", 1),
        ("files", 2),
    ]
    again = run.merged(json.loads(json.dumps(both)), told, *half(1, 0, 390.0))
    assert (again["failed"], again["figures"]["gpu_tests_failed"], len(again["rows"])) == (1, 1, 4)


@pytest.mark.parametrize("commits", [("c0ffee", "decaf"), (None, None)])
def test_a_half_of_another_or_of_no_known_commit_is_not_joined(run, commits):
    before = run.merged({}, {"commit": commits[0]}, *half(1, 0, 1.0))
    after = run.merged(before, {"commit": commits[1]}, *half(2, 0, 1.0))
    assert [row["half"] for row in after["rows"]] == [2, 2]
    assert after["figures"] == {}
