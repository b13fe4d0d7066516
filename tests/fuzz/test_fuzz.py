"""A few seconds of fuzzing for each target, and the driver itself: does it find what was planted?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, load
from run import Outcome, fuzz, keep

SECONDS = 6.0


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"planted"}))
def test_a_few_seconds_of_strange_inputs_show_no_fault(name: str, tmp_path: Path) -> None:
    outcome = fuzz(name, 20_000, 1, seed=20, faults=tmp_path, seconds=SECONDS)
    assert outcome.faults == {}
    assert outcome.inputs > 20
    assert outcome.edges > 50


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("exception", "KeyError at target_planted.py _fault"),
        ("thread", "TypeError at target_planted.py _raise_type_error"),
        ("loop", "Hang at target_planted.py _fault"),
        ("death", "the process ended: signal 9"),
        ("slow", "slow: over 0.5 s"),
        ("memory", "memory: over 64 MiB above the input's size"),
    ],
)
def test_a_planted_fault_is_found_named_and_kept_with_its_input(
    kind: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_FUZZ_PLANTED", f"{kind}:{tmp_path / 'planted'}")
    outcome = fuzz("planted", 40_000, 1, seed=1, faults=tmp_path / "faults", seconds=60)
    [(what, where)] = outcome.faults.items()
    assert what.startswith(fault)
    assert Path(where).read_bytes()[:4] == b"Fuzz"
    assert outcome.inputs >= 40_000


def test_without_a_fault_the_planted_target_is_clean_and_its_steps_are_coverage(tmp_path: Path) -> None:
    outcome = fuzz("planted", 40_000, 1, seed=1, faults=tmp_path, seconds=60)
    assert outcome.faults == {}
    assert outcome.kept >= 5
    assert outcome.refused > 100


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    first, second = (fuzz("decoder", 2000, 1, seed=3, faults=tmp_path).row() for _ in range(2))
    for same in ("inputs", "bytes", "refused", "new_coverage", "edges"):
        assert first[same] == second[same]


def test_results_are_merged_by_target_and_summed(tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    keep([Outcome("b", seed=1, inputs=5, bytes=50), Outcome("a", seed=1, inputs=7, faults={"x": "y"})], file)
    keep([Outcome("b", seed=2, inputs=10, bytes=60)], file)
    result = json.loads(file.read_text())
    assert [(row["target"], row["inputs"], row["seed"]) for row in result["rows"]] == [("a", 7, 1), ("b", 10, 2)]
    assert result["figures"] == {"fuzz_inputs": 17, "fuzz_faults": 1}


def test_every_target_has_inputs_to_begin_with() -> None:
    for name in TARGETS:
        assert load(name).corpus()
