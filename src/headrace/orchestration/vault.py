"""Names and lives of what a run keeps on disk: checkpoints, the best model, versions for the audit."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path


class FolderVault:
    """checkpoints/step-NNNNNN, checkpoints/best, versions/NNNNNNN.safetensors.

    Opening it removes what an earlier life of the run left unfinished.
    """

    def __init__(self, folder: Path, *, keep: int):
        self._checkpoints = folder / "checkpoints"
        self._versions = folder / "versions"
        self._keep = keep
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self._versions.mkdir(parents=True, exist_ok=True)
        for pattern in ("candidate-*", "*.tmp-*", "*.old-*"):
            for left in self._checkpoints.glob(pattern):
                shutil.rmtree(left)

    def checkpoint(self, step: int) -> str:
        return str(self._checkpoints / f"step-{step:06d}")

    def candidate(self, version: int) -> str:
        return str(self._checkpoints / f"candidate-{version:07d}")

    def version(self, number: int) -> str:
        return str(self._versions / f"{number:07d}.safetensors")

    async def choose(self, candidate: str, best: bool) -> None:
        await asyncio.to_thread(self._choose, Path(candidate), best)

    async def prune(self) -> None:
        await asyncio.to_thread(self._prune)

    def latest(self) -> str | None:
        """The newest checkpoint. They appear whole or not."""
        found = self._found()
        return str(found[-1]) if found else None

    def _found(self) -> list[Path]:
        return sorted(path for path in self._checkpoints.glob("step-*") if path.name[5:].isdigit())

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
        for path in self._found()[: -self._keep]:
            shutil.rmtree(path)
