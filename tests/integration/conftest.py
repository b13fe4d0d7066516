"""A user's folder with a small model, ready to train."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_project import CONFIG, USER_CODE, Project, make_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path, small_model: Path) -> Project:
    (tmp_path / "model").symlink_to(small_model)
    (tmp_path / "user.py").write_text(USER_CODE)
    (tmp_path / "config.toml").write_text(CONFIG)
    return Project(tmp_path)
