"""What a run keeps on disk, by name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.orchestration.vault import FolderVault, checkpoint_steps


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_checkpoints_are_found_in_the_order_of_their_steps(tmp_path):
    vault = FolderVault(tmp_path, keep=2)
    assert checkpoint_steps(tmp_path) == {}
    for step in (9, 100, 20):
        Path(vault.checkpoint(step)).mkdir()
    (tmp_path / "checkpoints" / "step-000200.tmp-x").mkdir()
    assert list(checkpoint_steps(tmp_path)) == [9, 20, 100]


def test_pruning_keeps_the_newest(tmp_path):
    vault = FolderVault(tmp_path, keep=2)
    for step in (1, 2, 3):
        Path(vault.checkpoint(step)).mkdir()
    asyncio.run(vault.prune())
    assert checkpoints(tmp_path) == ["step-000002", "step-000003"]


def test_a_better_candidate_becomes_the_best_and_a_worse_one_goes(tmp_path):
    vault = FolderVault(tmp_path, keep=2)
    for number, best in ((1, True), (2, False), (3, True)):
        candidate = Path(vault.candidate(number))
        candidate.mkdir()
        (candidate / "number").write_text(str(number))
        asyncio.run(vault.choose(str(candidate), best))
        assert checkpoints(tmp_path) == ["best"]
    assert (tmp_path / "checkpoints" / "best" / "number").read_text() == "3"


def test_what_was_being_replaced_comes_back(tmp_path):
    FolderVault(tmp_path, keep=2)
    (tmp_path / "checkpoints" / "step-000007.old-abc" / "step-000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best.old-").mkdir()
    FolderVault(tmp_path, keep=2)
    assert list(checkpoint_steps(tmp_path)) == [7]
    assert checkpoints(tmp_path) == ["best", "step-000007"]


def test_checkpoints_are_ordered_by_number_and_kept_versions_are_counted(tmp_path):
    vault = FolderVault(tmp_path, keep=2)
    for step in (999_999, 1_000_000):
        Path(vault.checkpoint(step)).mkdir()
    assert list(checkpoint_steps(tmp_path)) == [999_999, 1_000_000]
    for number in (3, 4, 5):
        Path(vault.version(number)).write_bytes(b"x" * 100)
    assert vault.kept_bytes() == 300
    vault.forget_versions(4)
    assert vault.kept_bytes() == 100


def test_opening_clears_what_an_earlier_life_left_unfinished(tmp_path):
    FolderVault(tmp_path, keep=2)
    for name in ("candidate-0000007", "step-000004.tmp-abc", "step-000003.old-abc", "step-000003"):
        (tmp_path / "checkpoints" / name).mkdir()
    FolderVault(tmp_path, keep=2)
    assert checkpoints(tmp_path) == ["step-000003"]


def test_checkpoints_of_later_steps_are_set_aside_and_not_pruned(tmp_path):
    vault = FolderVault(tmp_path, keep=1)
    for step in (3, 6, 9):
        Path(vault.checkpoint(step)).mkdir()
    vault.set_aside(3)
    Path(vault.checkpoint(5)).mkdir()
    asyncio.run(vault.prune())
    assert checkpoints(tmp_path) == ["orphaned-1", "step-000005"]
    assert sorted(path.name for path in (tmp_path / "checkpoints/orphaned-1").iterdir()) == [
        "step-000006",
        "step-000009",
    ]
