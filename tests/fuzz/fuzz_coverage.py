"""Which lines follow which, in the watched modules: an input that shows a new pair is worth changing further.

Python 3.11 has no `sys.monitoring`; `sys.settrace` is called for every function, and for every line of those that
are watched. That makes the tested code a few times slower, which a limit of seconds does not mind.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_LINES_PER_CODE = 1 << 20


class Coverage:
    """Use as a context manager around one input; `new` is then how many pairs it was the first to show."""

    def __init__(self, watched: tuple[str, ...]):
        self._watched = watched
        self._numbers: dict[CodeType, int | None] = {}
        self._seen: set[tuple[int, int]] = set()
        self._hit: set[tuple[int, int]] = set()
        self._last = 0
        self.new = 0

    @property
    def total(self) -> int:
        return len(self._seen)

    def __enter__(self) -> Coverage:
        self._hit.clear()
        self._last = 0
        threading.settrace(self._call)
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        before = len(self._seen)
        self._seen |= self._hit
        self.new = len(self._seen) - before

    def add(self, *features: tuple[int, int]) -> None:
        """Counts something else that an input showed, such as the error that it raised."""
        before = len(self._seen)
        self._seen.update(features)
        self.new += len(self._seen) - before

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if code not in self._numbers:
            module = frame.f_globals.get("__name__", "")
            inside = isinstance(module, str) and module.startswith(self._watched)
            self._numbers[code] = len(self._numbers) if inside else None
        number = self._numbers[code]
        if number is None:
            return None
        self._note(number * _LINES_PER_CODE)
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line":
            number = self._numbers[frame.f_code]
            assert number is not None
            self._note(number * _LINES_PER_CODE + frame.f_lineno)
        return self._line

    def _note(self, here: int) -> None:
        self._hit.add((self._last, here))
        self._last = here
