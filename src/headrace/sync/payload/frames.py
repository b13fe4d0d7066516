"""The delta payload's wire format, both ends: frames, each with the changes of at most some million elements.

    offset  size  field (little-endian)
    0       4     "HRD1"
    4       8     first: the byte of the image where the elements begin
    12      4     count: elements
    16      4     changed: how many of them
    20      1     unit: bytes of an element
    21      1     flags: 1 the body is the elements themselves, 2 the gaps have trits, 4 the values have
    22      2     shift of the gaps, shift of the values
    24      32    bytes of each stream: the gaps' trits, low, bytes and wide, then the same four of the values
    56      4     CRC-32 of the body
    60      4     CRC-32 of the 60 bytes before
    64      …     body: the eight streams (layers.py), or the elements where those are fewer bytes

A gap is the number of unchanged elements before a changed one. A value is the difference new - old of the elements
as whole numbers: 0 for -1, 1 for 1, 2 for -2, 3 for 2 and so on.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import SyncError
from headrace.sync.payload import layers
from headrace.sync.payload.changes import SIGNED, UNSIGNED, Changes, positions_of
from headrace.sync.payload.regions import Region

MAX_ELEMENTS = 1 << 26
"""Of one frame. No header makes a receiver take more memory than that many need."""
_MAGIC = b"HRD1"
_FIELDS = struct.Struct("<4sQIIBBBB8II")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_RAW, _GAP_TRITS, _VALUE_TRITS = 1, 2, 4


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A frame that arrived. Its checksums are right; what it says is checked where it is read."""

    region: Region
    changed: int
    bits: torch.Tensor | None
    """The new elements themselves, where they came rather than changes."""
    gaps: layers.Packed
    values: layers.Packed
    who: str

    def of(self, image: torch.Tensor) -> torch.Tensor:
        """The elements of `image` that the frame is about, as signed whole numbers."""
        if self.region.first + self.region.nbytes > len(image):
            raise self._damaged(f"the image has {len(image)} bytes")
        return self.region.of(image)

    def changes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions within the region, increasing, and what to add there, wrapping around."""
        positions, differences = self.arrays()
        return torch.from_numpy(positions), torch.from_numpy(differences)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]]:
        """What `changes` returns, as arrays."""
        if self.bits is not None:
            raise ValueError(f"a frame that has bits has no changes: {self.region}")
        try:
            positions = positions_of(layers.unpack(self.gaps, self.changed, np.uint32))
            numbers = layers.unpack(self.values, self.changed, UNSIGNED[self.region.unit])
        except layers.Malformed as fault:
            raise self._damaged(str(fault)) from fault
        if self.changed and positions[-1] >= self.region.count:
            raise self._damaged(f"it changes element {positions[-1]}")
        return positions, layers.unfold(numbers)

    def _damaged(self, why: str) -> SyncError:
        return SyncError("transfer", self.who, f"the frame of {self.region} is damaged: {why}")


def frame_bytes(found: Changes, region: Region, new: torch.Tensor) -> bytes:
    """The frame that makes `new`, the region's elements, of those in which the changes were found."""
    gaps, values = layers.pack(found.gaps), layers.pack(layers.fold(found.differences))
    streams = [*gaps.streams, *values.streams]
    flags = _GAP_TRITS * gaps.trits | _VALUE_TRITS * values.trits
    shifts = gaps.shift, values.shift
    if sum(map(len, streams)) >= region.nbytes > 0:
        flags, shifts, streams = _RAW, (0, 0), [new.cpu().numpy().tobytes(), *7 * [b""]]
    body = b"".join(streams)
    place = region.first, region.count, len(found.gaps), region.unit
    fields = _FIELDS.pack(_MAGIC, *place, flags, *shifts, *map(len, streams), zlib.crc32(body))
    return fields + _CHECKSUM.pack(zlib.crc32(fields)) + body


def frames(stream: Iterable[memoryview], who: str = "engine") -> Iterator[Frame]:
    """Each frame as soon as all of it is there, however the stream is cut. Raises SyncError("transfer", …) for a
    stream that is damaged or ends within a frame. One that ends between two frames looks whole."""
    source = _Source(stream)
    while header := source.take(HEADER_BYTES):
        if len(header) < HEADER_BYTES:
            raise SyncError("transfer", who, f"the delta ends within a frame's header, after {len(header)} bytes")
        region, changed, flags, shifts, lengths, checksum = _read_header(header, who)
        body = source.take(sum(lengths))
        if len(body) < sum(lengths):
            raise SyncError(
                "transfer", who, f"the delta ends within the frame of {region}, after {len(body)} bytes"
            )
        if zlib.crc32(body) != checksum:
            raise SyncError("transfer", who, f"the frame of {region} is damaged: its checksum is wrong")
        ends = list(itertools.accumulate(lengths, initial=0))
        streams = [memoryview(body)[start:end] for start, end in itertools.pairwise(ends)]
        yield Frame(
            region=region,
            changed=changed,
            bits=torch.frombuffer(body, dtype=SIGNED[region.unit]) if flags & _RAW else None,
            gaps=layers.Packed(bool(flags & _GAP_TRITS), shifts[0], streams[: layers.STREAMS]),
            values=layers.Packed(bool(flags & _VALUE_TRITS), shifts[1], streams[layers.STREAMS :]),
            who=who,
        )


def _read_header(header: bytearray, who: str) -> tuple[Region, int, int, tuple[int, int], list[int], int]:
    fields = header[: _FIELDS.size]
    magic, first, count, changed, unit, flags, gap_shift, value_shift, *lengths, checksum = _FIELDS.unpack(fields)
    if magic != _MAGIC or _CHECKSUM.unpack(header[_FIELDS.size :]) != (zlib.crc32(fields),):
        raise SyncError("transfer", who, f"no frame of a delta begins with the bytes {header.hex()}")
    if flags & _RAW:
        consistent = flags == _RAW and lengths == [count * unit, *7 * [0]] and count > 0
    else:
        consistent = flags < 2 * _VALUE_TRITS and sum(lengths) <= count * unit
    if not consistent or unit not in SIGNED or first % unit or not changed <= count <= MAX_ELEMENTS:
        raise SyncError("transfer", who, f"a frame's header contradicts itself: {header.hex()}")
    return Region(first, unit, count), changed, flags, (gap_shift, value_shift), lengths, checksum


class _Source:
    """Takes bytes from a stream that comes in pieces of any size."""

    def __init__(self, stream: Iterable[memoryview]):
        self._stream = iter(stream)
        self._rest = memoryview(b"")

    def take(self, wanted: int) -> bytearray:
        """A copy of the next `wanted` bytes, fewer only where the stream ends."""
        taken, filled = bytearray(wanted), 0
        while filled < wanted:
            if not self._rest:
                piece = next(self._stream, None)
                if piece is None:
                    del taken[filled:]
                    break
                view = memoryview(piece)
                self._rest = view.cast("B") if view.nbytes else self._rest
                continue
            part = self._rest[: wanted - filled]
            taken[filled : filled + len(part)] = part
            filled += len(part)
            self._rest = self._rest[len(part) :]
        return taken
