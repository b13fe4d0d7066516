"""Runs that are made once, of which each test changes a copy, and the tables of what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from audited_runs import plain_run, resumed_run
from outcomes import Outcomes


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> dict[str, Path]:
    """Folders of finished runs. `plain`: one turn an episode, swaps in mid-sequence. `resumed`: killed and resumed,
    with supports, several turns, failed and orphaned episodes."""
    return {
        "plain": plain_run(tmp_path_factory.mktemp("plain"), small_model),
        "resumed": resumed_run(tmp_path_factory.mktemp("resumed"), small_model),
    }


@pytest.fixture(scope="session")
def forged() -> Iterator[Outcomes]:
    yield from _told(Outcomes("tampering"))


@pytest.fixture(scope="session")
def bugged() -> Iterator[Outcomes]:
    yield from _told(Outcomes("planted"))


def _told(outcomes: Outcomes) -> Iterator[Outcomes]:
    yield outcomes
    outcomes.report()
