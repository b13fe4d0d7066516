"""A run's folder belongs to one run and one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import RunFolderError
from headrace.telemetry.folder import RunFolder


def begun(path: Path) -> RunFolder:
    run = RunFolder(path)
    run.make()
    run.config.write_text("seed = 0\n")
    return run


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"--resume.*--overwrite.*--run DIR"):
        run.make()
    assert run.config.read_text() == "seed = 0\n"


def test_overwriting_removes_a_run_but_never_another_folder(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with pytest.raises(RunFolderError, match="made no run"):
        run.make(overwrite=True)
    run.hold()
    run.release()
    (run.path / "notes").write_text("mine")
    run.make(overwrite=True)
    assert [path.name for path in run.path.iterdir()] == ["notes"]
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "chapter1.tex").write_text("words")
    with pytest.raises(RunFolderError, match="made no run"):
        RunFolder(precious).make(overwrite=True)
    assert (precious / "chapter1.tex").read_text() == "words"


def test_a_missing_run_is_refused_with_the_runs_there_are(tmp_path: Path) -> None:
    begun(tmp_path / "first")
    begun(tmp_path / "second")
    with pytest.raises(RunFolderError, match="first, second"):
        RunFolder(tmp_path / "third").require()
    with pytest.raises(RunFolderError, match="first, second"):
        RunFolder(tmp_path).require()
    assert RunFolder(tmp_path / "first").require().path == tmp_path / "first"


def test_a_second_process_is_kept_out_until_the_first_lets_go(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.hold()
    program = (
        "import sys; from headrace.telemetry.folder import RunFolder\n"
        f"try: RunFolder({str(run.path)!r}).hold()\n"
        "except Exception as error: print(error)\n"
        "else: print('held')"
    )

    def other_process() -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        return done.stdout

    assert "used by one process at a time" in other_process()
    run.release()
    assert other_process() == "held\n"


def test_rewinding_sets_orphaned_steps_aside_and_keeps_the_rest(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.episodes.mkdir()
    run.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)))
    for step in range(1, 6):
        run.step_file(step).write_text("{}\n")
    assert run.rewind(3) == {"metrics": 2, "episode_files": 2}
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]
    assert [number for number, _ in run.step_files()] == [1, 2, 3]
    aside = (run.path / "metrics.orphaned.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [4, 5]
    assert sorted(file.name for file in (run.episodes / "orphaned-1").iterdir()) == [
        "step-000004.jsonl",
        "step-000005.jsonl",
    ]
    assert run.rewind(3) == {"metrics": 0, "episode_files": 0}
