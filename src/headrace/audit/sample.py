"""Which stored episodes are recomputed: chosen while they pass, in memory for the chosen alone."""

from __future__ import annotations

import heapq
import zlib
from typing import NamedTuple

from headrace.audit.evidence import Evidence
from headrace.telemetry.episodes import StoredEpisode


class Place(NamedTuple):
    """Where a stored episode is."""

    step: int
    line: int


class Sample:
    """So many episodes all of whose versions are kept, spread over the run by their ids; half of them, if there are
    as many, saw a swap in their middle."""

    def __init__(self, evidence: Evidence, wanted: int):
        self.wanted = wanted
        folder = evidence.folder
        files = [] if folder is None else folder.versions.glob("*.safetensors")
        self._kept = {int(file.stem) for file in files if file.stem.isdecimal()}
        self._swapped: list[tuple[int, Place]] = []
        self._steady: list[tuple[int, Place]] = []

    def offer(self, item: StoredEpisode, place: Place) -> None:
        """One episode passes."""
        if not self.wanted:
            return
        needed = {event.version for turn in item.episode.turns for event in turn.lineage}
        if not needed or not needed <= self._kept:
            return
        steady = item.episode.version_min == item.episode.version_max
        heap = self._steady if steady else self._swapped
        entry = (-zlib.crc32(item.episode.id.encode()), place)
        if len(heap) < self.wanted:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)

    def places(self) -> list[Place]:
        """Those chosen, in the order they were trained on."""
        swapped, steady = sorted(self._swapped, reverse=True), sorted(self._steady, reverse=True)
        half = min(len(swapped), max(self.wanted // 2, self.wanted - len(steady)))
        return sorted(place for _, place in [*swapped[:half], *steady[: self.wanted - half]])
