"""Bugs planted in the writers of real runs, and what the audit says of each."""

from __future__ import annotations

from pathlib import Path

import pytest
from outcomes import Outcome, Outcomes, audited
from planted import PLANTED, Planted, planted_run


def test_names_are_told_apart():
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)


def test_a_run_with_the_settings_for_bugs_and_none_planted_passes(tmp_path: Path, small_model: Path):
    assert audited(planted_run(tmp_path, small_model, None)) == ("unnoticed", "")


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_run_with_a_planted_bug_is_audited(bug: Planted, tmp_path: Path, small_model: Path, bugged: Outcomes):
    run = planted_run(tmp_path, small_model, bug)
    bugged.add(Outcome(bug.name, True, *audited(run), bug.unseeable))
