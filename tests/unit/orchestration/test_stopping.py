"""Signals reach a run that has a thread of its own; the caller's handlers are there again afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.orchestration.stopping import SIGNALS, execute_beside


class Run:
    """Ends in order when it is told to stop, at once when told so or told again."""

    def __init__(self, *kills: int, error: Exception | None = None):
        self.calls: list[bool] = []
        self._kills = list(kills)
        self._error = error

    async def execute(self) -> str:
        self._loop, self._task, self._stopped = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        assert threading.current_thread() is not threading.main_thread()
        for number in self._kills:
            told = len(self.calls)
            os.kill(os.getpid(), number)
            while len(self.calls) == told:
                await asyncio.sleep(0.001)
        if self._error is not None:
            raise self._error
        await self._stopped.wait()
        return "ended in order"

    def stop_from_outside(self, *, at_once: bool = False) -> None:
        self.calls.append(at_once)
        again = len(self.calls) > 1 or at_once
        self._loop.call_soon_threadsafe(self._task.cancel if again else self._stopped.set)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[Any]]:
    """Those of the caller, who has some of its own."""
    before = [signal.signal(number, lambda number, frame: None) for number in SIGNALS]
    ours = [signal.getsignal(number) for number in SIGNALS]
    yield ours
    assert [signal.getsignal(number) for number in SIGNALS] == ours
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_ends_a_run_in_order(number: int) -> None:
    run = Run(number)
    assert execute_beside(run) == "ended in order"
    assert run.calls == [False]


def test_the_second_signal_ends_it_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        execute_beside(Run(signal.SIGINT, signal.SIGINT))


def test_what_ends_a_run_is_told_to_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        execute_beside(Run(error=ZeroDivisionError()))


def test_on_another_thread_signals_are_left_to_the_main_one() -> None:
    run, found = Run(), []
    thread = threading.Thread(target=lambda: found.append(execute_beside(run)))
    thread.start()
    while not hasattr(run, "_stopped"):
        pass
    run.stop_from_outside()
    thread.join(10)
    assert found == ["ended in order"]
