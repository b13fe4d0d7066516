"""Weight sync under faults: a process killed or stopped at every stage, damaged and missing bytes, a full disk.

Two engines are under load all the while. After each fault, and at every look in between, an engine serves exactly
the bits of the version that it claims; no wait is longer than its deadline; every request is answered; and the next
version reaches all engines. What fails says its number. To repeat number 17 alone:

    python tests/integration/fault_trials.py 17
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from fault_rig import Outcome
from fault_trials import FAMILIES, LINKS, carry_out, complaints, draw, table

# Every family of faults once, and every link once or twice.
SAMPLE = [len(LINKS) * family + (family + 4) % len(LINKS) for family in range(len(FAMILIES))]


def trials(numbers: Iterable[int], folder: Path) -> list[Outcome]:
    return asyncio.run(carry_out([draw(number) for number in numbers], folder))


def test_the_sample_has_every_fault_and_every_link():
    drawn = [draw(number) for number in SAMPLE]
    assert {(trial.transport, trial.payload) for trial in drawn} == set(LINKS)
    assert {trial.family for trial in drawn} == {family for family, _ in FAMILIES}


def test_weight_sync_heals_after_any_fault(tmp_path):
    outcomes = trials(SAMPLE, tmp_path)
    assert complaints(outcomes) == []
    assert len(outcomes) == len(FAMILIES)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_weight_sync_heals_after_500_faults(tmp_path):
    outcomes = trials(range(500), tmp_path)
    print(table(outcomes))
    assert complaints(outcomes) == []
    assert len(outcomes) == 500
