"""A component's own clock."""

from __future__ import annotations

from headrace.usage import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_busy_idle_and_overhead_add_up_to_wall_time():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.state("idle"):
        clock.now += 2
        with watch.state("busy"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    usage = watch.usage(tokens=7)
    assert (usage.busy_s, usage.idle_s, usage.overhead_s) == (4, 10, 17)
    assert usage.wall_s == 31
    clock.now += 1
    later = watch.usage(tokens=9).since(usage)
    assert (later.overhead_s, later.wall_s, later.tokens) == (1, 1, 2)
