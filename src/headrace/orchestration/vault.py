"""Names and lives of what a run keeps on disk: checkpoints, the best model, versions for the audit."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path


class FolderVault:
    """checkpoints/step-NNNNNN, best and final, versions/NNNNNNN.safetensors.

    Opening it removes what an earlier life of the run left unfinished.
    """

    def __init__(self, folder: Path, *, keep: int):
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._versions = folder / "versions"
        self._keep = keep
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self._versions.mkdir(parents=True, exist_ok=True)
        self._put_back()
        for pattern in ("candidate-*", "*.tmp-*", "*.old-*"):
            for left in self._checkpoints.glob(pattern):
                shutil.rmtree(left)
        for left in self._versions.glob("*.tmp-*"):
            left.unlink()

    def checkpoint(self, step: int) -> str:
        return str(self._checkpoints / f"step-{step:06d}")

    @staticmethod
    def step_of(checkpoint: Path | None) -> int:
        """The training step of a checkpoint's folder; 0 for none."""
        return 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))

    def candidate(self, version: int) -> str:
        return str(self._checkpoints / f"candidate-{version:07d}")

    def final(self) -> str:
        return str(self._checkpoints / "final")

    def version(self, number: int) -> str:
        return str(self._versions / f"{number:07d}.safetensors")

    async def choose(self, candidate: str, best: bool) -> None:
        await asyncio.to_thread(self._choose, Path(candidate), best)

    async def prune(self) -> None:
        await asyncio.to_thread(self._prune)

    def set_aside(self, step: int) -> None:
        """Move checkpoints of later steps out of the way: a run that goes on from `step` leaves them behind."""
        later = [path for number, path in checkpoint_steps(self._folder).items() if number > step]
        if later:
            aside = self._checkpoints / f"orphaned-{len(list(self._checkpoints.glob('orphaned-*'))) + 1}"
            aside.mkdir()
            for path in later:
                path.rename(aside / path.name)

    def forget_versions(self, first: int) -> None:
        """Remove kept weights from number `first` on: a crash kept them before their number was given out."""
        for file in self._versions.glob("*.safetensors"):
            if file.stem.isdecimal() and int(file.stem) >= first:
                file.unlink()

    def kept_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._versions.glob("*.safetensors"))

    def _put_back(self) -> None:
        """What was being replaced when the run died comes back where nothing has taken its place."""
        for old in self._checkpoints.glob("*.old-*"):
            place = self._checkpoints / old.name.split(".old-")[0]
            inside = old / place.name
            if not place.exists():
                (inside if inside.exists() else old).rename(place)

    def _choose(self, candidate: Path, best: bool) -> None:
        if not best:
            shutil.rmtree(candidate)
            return
        place, old = self._checkpoints / "best", self._checkpoints / "best.old-"
        if place.exists():
            place.rename(old)
        candidate.rename(place)
        shutil.rmtree(old, ignore_errors=True)

    def _prune(self) -> None:
        for path in list(checkpoint_steps(self._folder).values())[: -self._keep]:
            shutil.rmtree(path)


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """A run's checkpoints by their steps, in order. They appear whole or not."""
    paths = [path for path in (folder / "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return dict(sorted((int(path.name[5:]), path) for path in paths))
