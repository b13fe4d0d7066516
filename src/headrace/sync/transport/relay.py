"""One engine of a machine receives a stream and its neighbours copy it: handed on through shared memory.

The engine that receives, the leader, lets the bytes arrive in a segment; the others follow while they do. The
segment's generation is the stream's own, which is even and grows from stream to stream. The odd one after it says
that the leader has given the stream up.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from headrace.errors import DeadlineExceeded, SyncError
from headrace.sync.base import Stream
from headrace.sync.deadline import Deadline
from headrace.sync.transport.shared_memory import CHUNK_BYTES, Segment


class Relay:
    """Both sides of it. The descriptor belongs to who created it."""

    def __init__(self, descriptor: int):
        self._segment = Segment(descriptor)

    def last(self) -> int:
        """Of the generations that were handed on so far. The sender's: it makes the segment readable."""
        self._segment.bytes(0, grow=True)
        return self._segment.told()[0]

    # ── The leader's side ────────────────────────────────────────────────────────────────────────────────

    def begin(self, generation: int, nbytes: int) -> Tensor:
        """Memory for the stream to arrive in. What was there is on offer no more."""
        memory = self._segment.bytes(nbytes, grow=True)
        # Nobody may see the new generation with what was filled of the one before.
        self._segment.tell(self._segment.told()[0], 0)
        self._segment.tell(generation, 0)
        return memory

    def advance(self, generation: int, filled: int) -> None:
        self._tell(generation, generation, filled)

    def give_up(self, generation: int) -> None:
        self._tell(generation, generation + 1, 0)

    # ── The neighbours' side ─────────────────────────────────────────────────────────────────────────────

    def follow(
        self, generation: int, leader: str, stream: Stream, deadline: Deadline, who: str
    ) -> Iterator[tuple[int, Tensor]]:
        """Views of the segment, as far as it is filled. As an inlet's `chunks`."""
        done = 0
        while True:
            told, filled = self._segment.told()
            if told > generation:
                what = f"was given up by {leader}" if told == generation + 1 else "was replaced by a later one"
                why = f"version {stream.number} {what} after {done} of {stream.nbytes} bytes"
                raise SyncError("transfer", who, why)
            if told == generation and done == stream.nbytes:
                return
            if told < generation or filled <= done:
                _wait(deadline, f"of which {leader} had handed on {done} of {stream.nbytes} bytes")
                continue
            deadline.progress()
            memory = self._segment.bytes(stream.nbytes, grow=False)
            while done < filled:
                end = min(done + CHUNK_BYTES, filled)
                yield done, memory[done:end]
                done = end

    def close(self) -> None:
        self._segment.close()

    def _tell(self, own: int, generation: int, filled: int) -> None:
        # A leader that was stopped for a while may no longer be the one.
        if self._segment.told()[0] <= own:
            self._segment.tell(generation, filled)


def _wait(deadline: Deadline, state: str) -> None:
    try:
        deadline.pause()
    except DeadlineExceeded as late:
        who, whom, seconds, look_at = late.args
        raise DeadlineExceeded(who, f"{whom}, {state}", seconds, look_at) from None
