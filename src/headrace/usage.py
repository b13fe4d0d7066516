"""Where a component's time goes, measured by its own clock: busy, idle and overhead add up to wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from headrace.records import Record, message

State = Literal["busy", "idle", "overhead"]


@message
class Usage(Record):
    """Where a component's wall time went since it started, and what it did in it."""

    busy_s: float = 0.0
    """Inside forward, backward or optimizer passes."""
    idle_s: float = 0.0
    """Waiting with nothing to do."""
    overhead_s: float = 0.0
    """Everything else: messages, scheduling, weight transfer."""
    tokens: int = 0
    """Sampled by an engine; trained on by a trainer."""
    running: int = 0
    waiting: int = 0
    device_peak: int = 0
    """Most bytes of a GPU that it has held at once, its context apart."""
    device_allocated: int = 0
    """Those of them that tensors were in."""

    @property
    def wall_s(self) -> float:
        return self.busy_s + self.idle_s + self.overhead_s

    def plus(self, other: Usage) -> Usage:
        return Usage(
            busy_s=self.busy_s + other.busy_s,
            idle_s=self.idle_s + other.idle_s,
            overhead_s=self.overhead_s + other.overhead_s,
            tokens=self.tokens + other.tokens,
            running=self.running + other.running,
            waiting=self.waiting + other.waiting,
            device_peak=max(self.device_peak, other.device_peak),
            device_allocated=max(self.device_allocated, other.device_allocated),
        )

    def since(self, earlier: Usage) -> Usage:
        """The part of this that came after `earlier`."""
        return Usage(
            busy_s=self.busy_s - earlier.busy_s,
            idle_s=self.idle_s - earlier.idle_s,
            overhead_s=self.overhead_s - earlier.overhead_s,
            tokens=self.tokens - earlier.tokens,
            running=self.running,
            waiting=self.waiting,
            device_peak=self.device_peak,
            device_allocated=self.device_allocated,
        )


class Stopwatch:
    """Always in exactly one state. Not thread-safe: it belongs to the thread whose time it measures."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._state: State = "overhead"
        self._since = clock()
        self._spent: dict[State, float] = {"busy": 0.0, "idle": 0.0, "overhead": 0.0}

    @contextmanager
    def state(self, state: State) -> Iterator[None]:
        """Spend the block in `state`, then return to the state before."""
        before = self._state
        self._enter(state)
        try:
            yield
        finally:
            self._enter(before)

    def usage(self, *, tokens: int = 0, running: int = 0, waiting: int = 0) -> Usage:
        self._enter(self._state)
        spent = self._spent
        return Usage(
            busy_s=spent["busy"],
            idle_s=spent["idle"],
            overhead_s=spent["overhead"],
            tokens=tokens,
            running=running,
            waiting=waiting,
        )

    def _enter(self, state: State) -> None:
        now = self._clock()
        self._spent[self._state] += now - self._since
        self._state, self._since = state, now
