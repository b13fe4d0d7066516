"""A run beside a loop that runs already, as in a notebook, and how Ctrl-C and SIGTERM reach it there."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What ends a run: in order the first time, at once the second."""

Outcome = TypeVar("Outcome", covariant=True)


class Stoppable(Protocol[Outcome]):
    def execute(self) -> Coroutine[Any, Any, Outcome]: ...

    def stop_from_outside(self, *, at_once: bool = False) -> None:
        """Called by another thread than the loop's. The first call ends the run in order, a second one, or one
        with `at_once`, cancels it."""
        ...


def execute_beside(run: Stoppable[Outcome]) -> Outcome:
    """Execute it on a thread of its own and wait. Where this is the main thread, signals are the run's meanwhile.
    KeyboardInterrupt where they have ended it at once."""
    with ThreadPoolExecutor(1, "headrace-run") as thread:
        with _signals_to(run.stop_from_outside) as heard:
            ending = thread.submit(lambda: asyncio.run(run.execute()))
            try:
                return ending.result()
            except asyncio.CancelledError:
                raise (KeyboardInterrupt() if heard else RuntimeError("the run was cancelled")) from None
            except BaseException:
                if not ending.done():
                    # Something was raised into this thread: a run that nobody waits for does not go on.
                    run.stop_from_outside(at_once=True)
                raise


@contextmanager
def _signals_to(stop: Callable[[], None]) -> Iterator[list[int]]:
    """The signals that were heard. Python gives them to the main thread, and no other thread can ask for them."""
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        stop()

    with handlers_restored() as may_hear:
        for number in SIGNALS if may_hear else ():
            signal.signal(number, hear)
        yield heard


@contextmanager
def handlers_restored() -> Iterator[bool]:
    """The caller's own handlers are there again afterwards. Whether this thread may set any."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        yield True
    finally:
        for number, handler in before:
            # None is a handler that was not set from Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
