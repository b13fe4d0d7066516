"""Following a sender that fills memory and tells how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.errors import SyncError
from headrace.sync.base import Stream
from headrace.sync.deadline import Deadline


def follow(
    stream: Stream, deadline: Deadline, who: str, told: Callable[[], tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Where bytes of the stream begin and end that are there now, again and again until all were.

    `told` has the generation of what is on offer and how much of it is filled. It is asked once more when the last
    bytes were taken: they count only if they were still the stream's by then.
    """
    done = 0
    while True:
        generation, filled = told()
        if generation != stream.location.get("generation"):
            why = f"version {stream.number} was replaced by a later one after {done} of {stream.nbytes} bytes"
            raise SyncError("transfer", who, why)
        if done == stream.nbytes:
            return
        if filled == done:
            deadline.pause()
            continue
        deadline.progress()
        yield done, filled
        done = filled
