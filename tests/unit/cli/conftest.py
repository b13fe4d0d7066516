from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / room) for room in ("config", "telemetry")]

from cli_answer import Answer
from folder_builders import write_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a configuration that is in order, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write_project(tmp_path)


@pytest.fixture
def headrace(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command line, called in this process."""

    def call(*arguments: object) -> Answer:
        from headrace.cli.main import main

        monkeypatch.setattr(sys, "argv", ["headrace", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "160")
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return Answer(code, out, err)

    return call
