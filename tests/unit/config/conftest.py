from pathlib import Path

import pytest
from folder_builders import write_project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a configuration that is in order, in the current directory."""
    monkeypatch.chdir(tmp_path)
    return write_project(tmp_path)
