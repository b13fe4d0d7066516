"""Runs that are made once, of which each test changes a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from audited_runs import plain_run, resumed_run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """The folder of a finished run: one turn an episode, swaps in mid-sequence."""
    return plain_run(tmp_path_factory.mktemp("plain"), small_model)


@pytest.fixture(scope="session")
def resumed(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """The folder of a finished run with supports, several turns, failed and orphaned episodes."""
    return resumed_run(tmp_path_factory.mktemp("resumed"), small_model)
