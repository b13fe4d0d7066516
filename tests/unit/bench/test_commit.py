from __future__ import annotations

import subprocess
from pathlib import Path

from headrace.bench import commit


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_checkout_is_its_commit_and_marked_when_more_than_results_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_COMMIT", "of another machine")
    inner, results = tmp_path / "src" / "package", tmp_path / "benchmarks" / "results"
    for folder in (inner, results):
        folder.mkdir(parents=True)
        (folder / "file").write_text("one")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    expected = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert commit(inner) == expected
    (results / "file").write_text("two")
    assert commit(inner) == expected
    (inner / "file").write_text("two")
    assert commit(inner) == f"{expected}-dirty"


def test_a_copy_of_the_tree_is_what_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("HEADRACE_COMMIT", "b55a802f35c7")
    assert commit(tmp_path) == "b55a802f35c7"
    monkeypatch.delenv("HEADRACE_COMMIT")
    assert commit(tmp_path) is None
