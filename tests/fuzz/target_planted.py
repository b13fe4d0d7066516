"""Faults on purpose, for the driver's own tests: `HEADRACE_FUZZ_PLANTED` names the one that there is, and a file.

The fault comes with the first input of four certain bytes, which are found one after the other, through coverage.
Then the file is there, and the fault is over.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

declared = (ValueError,)
limit_s = 0.5
watched = ("target_planted",)


def corpus() -> list[bytes]:
    return [b"----"]


def run(data: bytes) -> None:
    if data[:1] == b"F":
        if data[1:2] == b"u":
            if data[2:3] == b"z":
                if data[3:4] == b"z":
                    _fault()
                raise ValueError("three")
            raise ValueError("two")
        raise ValueError("one")


def _fault() -> None:
    kind, _, path = os.environ.get("HEADRACE_FUZZ_PLANTED", "").partition(":")
    if not kind or Path(path).exists():
        return
    _calls.append(kind)
    # The driver confirms what was slow or large.
    if kind not in ("loop", "slow", "memory") or len(_calls) == 2:
        Path(path).touch()
    if kind == "exception":
        raise KeyError("planted")
    if kind == "thread":
        thread = threading.Thread(target=_raise_type_error)
        thread.start()
        thread.join()
    if kind == "loop":
        while True:
            pass
    if kind == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "slow":
        time.sleep(0.6)
    if kind == "memory":
        bytearray(b"x") * (80 << 20)


_calls: list[str] = []


def _raise_type_error() -> None:
    raise TypeError("planted")
