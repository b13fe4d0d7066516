"""Runs that are made once, of which each test changes a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
from audited_runs import plain_run, resumed_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> dict[str, Path]:
    """Folders of finished runs. `plain`: one turn an episode, swaps in mid-sequence. `resumed`: killed and resumed,
    with supports, several turns, failed and orphaned episodes."""
    return {
        "plain": plain_run(tmp_path_factory.mktemp("plain"), small_model),
        "resumed": resumed_run(tmp_path_factory.mktemp("resumed"), small_model),
    }
