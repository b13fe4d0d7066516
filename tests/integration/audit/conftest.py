"""Runs that are made once, of which each test changes a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from audited_runs import plain_run, resumed_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> dict[str, Path]:
    """Folders of finished runs. `plain`: one turn an episode, swaps in mid-sequence. `resumed`: killed and resumed,
    with supports, several turns, failed and orphaned episodes."""
    return {
        "plain": plain_run(tmp_path_factory.mktemp("plain"), small_model),
        "resumed": resumed_run(tmp_path_factory.mktemp("resumed"), small_model),
    }


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Replays of tiny models: threads that wait for each other would take ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
