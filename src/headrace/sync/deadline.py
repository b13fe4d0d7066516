"""Waiting for another process without waiting for ever."""

from __future__ import annotations

import time

from headrace.errors import DeadlineExceeded

_FIRST_PAUSE_S = 5e-5
_LONGEST_PAUSE_S = 2e-3


class Deadline:
    """Seconds from now on, for one stage of a publication."""

    def __init__(self, seconds: float, who: str, whom: str):
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._who = who
        self._whom = whom
        self._pause = _FIRST_PAUSE_S

    @property
    def left(self) -> float:
        """Raises DeadlineExceeded where nothing is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(self._who, self._whom, self._seconds, "sync.deadline_s, and the sender's log")
        return left

    def pause(self) -> None:
        """Let a little time pass, more and more of it until `progress`."""
        time.sleep(min(self._pause, self.left))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def progress(self) -> None:
        """What was waited for came: the next wait begins with short pauses."""
        self._pause = _FIRST_PAUSE_S
