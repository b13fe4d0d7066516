"""Bugs planted in the writers of real runs: each is found, from what they left behind alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from outcomes import ALL, NOBODY, RECORDS, REPLAY, audited
from planted import PLANTED, Planted, planted_run

QUICK = (
    "a token's version one too low",
    "a support cut off",
    "the advantages of another group",
    "an episode trained twice and booked once",
    "episodes booked twice",
    "an episode lost from a stored file",
)
"""Each bug is a run of its own: the others are for `make test-full`."""


def test_names_are_told_apart():
    names = {bug.name for bug in PLANTED}
    assert len(names) == len(PLANTED)
    assert set(QUICK) <= names


def test_a_run_with_the_settings_for_bugs_and_none_planted_passes(tmp_path: Path, small_model: Path):
    assert audited(planted_run(tmp_path, small_model, None), ALL) == ""


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=bug.name, marks=[] if bug.name in QUICK else pytest.mark.full) for bug in PLANTED],
)
def test_a_bug_planted_in_a_writer_is_found(
    bug: Planted, tmp_path: Path, small_model: Path, trial: Callable[..., None]
):
    run = planted_run(tmp_path, small_model, bug)
    how, what = RECORDS, audited(run)
    if not what:
        how, what = REPLAY, audited(run, ALL)
    trial("planted-bugs", name=bug.name, found_by=how if what else NOBODY, what=what[:300])
    assert what or bug.unseeable
