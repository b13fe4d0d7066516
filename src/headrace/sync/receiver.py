"""An engine's end: from the streams of a manifest to standby buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from headrace.errors import SyncError
from headrace.sync.base import Inlet, Manifest, Seal, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.payload.delta import frames
from headrace.sync.placement import Placement, checksums

_PAIRINGS = 4
"""Placements that are kept: two sets of buffers, of the model and of an adapter."""


class Receiver:
    """Touches nothing but the buffers it is given, which stay where they are until it is to `forget` them, and
    within a version's stages are the same mapping. Not thread-safe."""

    def __init__(self, inlet: Inlet, *, deadline_s: float = 120.0, who: str = "engine"):
        self._inlet = inlet
        self._deadline_s = deadline_s
        self._who = who
        self._placements: deque[Placement] = deque(maxlen=_PAIRINGS)
        self._last: tuple[Manifest, Mapping[str, Tensor], Placement] | None = None

    def check(self, manifest: Manifest, standby: Mapping[str, Tensor], *, has: int | None = None) -> None:
        """Stage 1: raise SyncError("announce", …) unless every buffer is written exactly once, nothing is left
        over, and the streams lead to the version from the one that the engine `has`."""
        self._placement(manifest, standby)
        if not manifest.route(has):
            bases = [stream.base for stream in manifest.streams]
            why = f"version {manifest.version.number} is offered as changes since {bases}, and here is {has}"
            raise SyncError("announce", self._who, why)

    def receive(
        self,
        manifest: Manifest,
        standby: Mapping[str, Tensor],
        *,
        has: int | None = None,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        """Stage 2: bring the version into the buffers. Where it comes as changes, `refresh` is called first and
        makes them a copy of version `has`."""
        placement = self._placement(manifest, standby)
        deadline = Deadline(self._deadline_s, self._who, f"version {manifest.version.number}")
        route = manifest.route(has)
        if not route:
            self.check(manifest, standby, has=has)
        if route[0].base is not None:
            refresh()
        for stream in route:
            if stream.base is None:
                for offset, chunk in self._inlet.chunks(stream, deadline, placement.block):
                    placement.write(offset, chunk)
            else:
                for frame in frames(self._bytes(stream, deadline), self._who):
                    placement.apply(frame)
        placement.settle()

    def look(self, manifest: Manifest, standby: Mapping[str, Tensor]) -> None:
        """Between the two: what of stage 3 needs no seal, so that it is quick once there is one."""
        self._placement(manifest, standby).look()

    def verify(self, manifest: Manifest, seal: Seal, standby: Mapping[str, Tensor]) -> None:
        """Stage 3: raise SyncError("verify", …) unless every buffer's bytes have the checksum of the seal."""
        self._placement(manifest, standby).verify(manifest, seal)

    def fingerprint(self, manifest: Manifest, live: Mapping[str, Tensor]) -> Seal:
        """The seal that a version with the manifest's tensors would have, were these its parameters."""
        return Seal(number=manifest.version.number, checksums=checksums(manifest.tensors, live, self._who))

    def forget(self) -> None:
        """Let go of all buffers."""
        self._placements.clear()
        self._last = None

    def close(self) -> None:
        self._inlet.close()

    def _bytes(self, stream: Stream, deadline: Deadline) -> Iterator[memoryview]:
        for _, chunk in self._inlet.chunks(stream, deadline, None):
            yield chunk.cpu().numpy().data

    def _placement(self, manifest: Manifest, standby: Mapping[str, Tensor]) -> Placement:
        """The buffers of one side have the same addresses each time it is their turn."""
        if self._last is None or self._last[0] is not manifest or self._last[1] is not standby:
            self._last = manifest, standby, self._paired(manifest, standby)
        return self._last[2]

    def _paired(self, manifest: Manifest, standby: Mapping[str, Tensor]) -> Placement:
        for known in self._placements:
            if known.pairs(manifest.tensors, standby):
                return known
        self._placements.append(Placement(manifest.tensors, manifest.nbytes, standby, self._who))
        return self._placements[-1]
