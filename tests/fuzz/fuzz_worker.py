"""The process that tries inputs on a target. It may hang, crash or be killed: `run.py` watches it and counts."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, BinaryIO

from fuzz_coverage import Coverage
from fuzz_mutations import havoc, splice
from fuzz_targets import Target, load

_HERE = Path(__file__).resolve().parent
HEAD_BYTES = 24
"""Before the current input: how many inputs were begun, their bytes, and this one's length."""
_REPORT_EVERY_S = 0.5
_ADDRESS_SPACE_ABOVE = 2 << 30
"""So much more than at the start can be asked for. More than that is a MemoryError, which nothing declares."""
_MOST_KEPT = 4000
_KEPT_FAULTS = 20


class Hang(BaseException):
    """Raised in an input that takes too long, wherever it is."""


@dataclass
class Progress:
    inputs: int = 0
    bytes: int = 0
    edges: int = 0
    kept: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    """By what went wrong and where: the file that holds the first such input."""
    done: bool = False


def work(name: str, seed: int, inputs: int, size: int, seconds: float, current: Path, faults: Path) -> None:
    """Tries inputs until there were as many, and as many bytes, or the seconds are over."""
    _Worker(load(name), Random(seed), current, faults).work(inputs, size, seconds)


class _Worker:
    def __init__(self, target: Target, random: Random, current: Path, faults: Path):
        self._target = target
        self._random = random
        self._faults = faults
        self._coverage = Coverage(target.watched)
        self._pool: list[bytes] = []
        self._progress = Progress()
        self._in_threads: list[BaseException] = []
        with current.open("r+b") as file:
            self._current = mmap.mmap(file.fileno(), 0)
        # What the target prints must not come between the reports.
        self._reports = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def work(self, inputs: int, size: int, seconds: float) -> None:
        signal.signal(signal.SIGALRM, _hang)
        threading.excepthook = lambda args: self._in_threads.append(args.exc_value or args.exc_type())
        _limit_address_space()
        end = time.monotonic() + seconds
        reported = 0.0
        with self._target.session():
            for data in self._inputs():
                self._try(data)
                now = time.monotonic()
                progress = self._progress
                progress.done = (progress.inputs >= inputs and progress.bytes >= size) or now >= end
                if progress.done or now >= reported + _REPORT_EVERY_S:
                    _report(self._reports, progress)
                    reported = now
                if progress.done:
                    return

    def _inputs(self) -> Iterator[bytes]:
        """The corpus, then changes of what showed something new, and new ones where the target can make them."""
        corpus = [data[: self._target.longest] for data in self._target.corpus()]
        yield from corpus
        self._pool += corpus
        while True:
            yield self._next()[: self._target.longest]

    def _next(self) -> bytes:
        random, target = self._random, self._target
        if target.generate is not None and random.random() < 0.15:
            return target.generate(random)
        # Late finds are the interesting ones: half of the time one of the newest.
        newest = self._pool[-64:] if random.random() < 0.5 else self._pool
        data = random.choice(newest)
        if target.mutate is not None and random.random() < 0.6:
            return target.mutate(data, random)
        if random.random() < 0.05:
            return bytes(splice(data, random.choice(self._pool), random))
        return havoc(data, random, target.dictionary, self._pool, target.longest)

    def _try(self, data: bytes) -> None:
        progress = self._progress
        progress.inputs += 1
        progress.bytes += len(data)
        self._write_current(data)
        with _measured() as cost:
            problem, details, feature = self._outcome(data, traced=True)
        self._coverage.add(feature)
        limit = self._target.memory_mib * 2**20
        hung = problem is not None and problem.startswith(Hang.__name__)
        if hung or (problem is None and (cost.seconds > self._target.limit_s or cost.bytes > limit)):
            # A busy machine may have been the reason, or memory that the coverage took: ask again without it.
            with _measured() as cost:
                problem, details, _ = self._outcome(data, traced=False)
            if problem is None and cost.seconds > self._target.limit_s:
                problem = f"slow: over {self._target.limit_s:g} s"
            if problem is None and cost.bytes > limit:
                problem = f"memory: over {self._target.memory_mib:g} MiB above the input's size"
        progress.slowest_s = max(progress.slowest_s, cost.seconds)
        progress.peak_bytes = max(progress.peak_bytes, cost.bytes)
        if problem is not None and problem not in progress.faults and len(progress.faults) < _KEPT_FAULTS:
            file = self._faults / f"{len(progress.faults)}-{os.getpid()}"
            file.write_bytes(data)
            file.with_suffix(".txt").write_text(f"{problem}\n{details}")
            progress.faults[problem] = str(file)
        if self._coverage.new and len(self._pool) < _MOST_KEPT and progress.inputs > 1:
            self._pool.append(data)
        progress.edges = self._coverage.total
        progress.kept = len(self._pool)

    def _outcome(self, data: bytes, traced: bool) -> tuple[str | None, str, tuple[int, int]]:
        """What was wrong, None if nothing; its traceback; and what the coverage shall count of the answer."""
        self._in_threads.clear()
        raised: BaseException | None = None
        signal.setitimer(signal.ITIMER_REAL, 2 * self._target.limit_s)
        try:
            if traced:
                with self._coverage:
                    self._target.run(data)
            else:
                self._target.run(data)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the point of it all: whatever is raised is looked at
            raised = error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(raised, self._target.declared):
            self._progress.refused += 1
        found = [
            e for e in (raised, *self._in_threads) if e is not None and not isinstance(e, self._target.declared)
        ]
        problem = _words(found[0]) if found else None
        details = "".join(traceback.format_exception(found[0]))[-20_000:] if found else ""
        # An error's rule, without what differs from input to input, tells one refusal from another.
        rule = "" if raised is None else type(raised).__name__ + _without_values(str(getattr(raised, "rule", "")))
        return problem, details, (-1, sum(ord(char) * 31**place for place, char in enumerate(rule)) % (1 << 61))

    def _write_current(self, data: bytes) -> None:
        progress = self._progress
        head = b"".join(number.to_bytes(8, "little") for number in (progress.inputs, progress.bytes, len(data)))
        self._current[: HEAD_BYTES + len(data)] = head + data


def _without_values(rule: str) -> str:
    return "".join(char for char in rule[:40] if char.isalpha())


def _words(error: BaseException) -> str:
    """The type, and the innermost place in this project that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_ours(Path(f.filename))]
    place = f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "?"
    if frames and not isinstance(error, Hang):
        place += f":{frames[-1].lineno}"
    return f"{type(error).__name__} at {place}"


def _is_ours(file: Path) -> bool:
    ours = file.is_relative_to(_HERE.parents[1]) and ".venv" not in file.parts
    return ours and not file.name.startswith("fuzz_")


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


@dataclass
class _Cost:
    seconds: float = 0.0
    bytes: int = 0


@contextmanager
def _measured() -> Iterator[_Cost]:
    """The time taken, and the most memory that was resident above what it was before."""
    cost = _Cost()
    _forget_peak()
    before, begun = _peak(), time.perf_counter()
    yield cost
    cost.seconds = time.perf_counter() - begun
    cost.bytes = max(0, _peak() - before)


_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_can_forget = _CLEAR_REFS.exists()


def _forget_peak() -> None:
    """Sets the process's peak back to what is resident now, where the system can do so. Elsewhere peaks only rise,
    and what an earlier input took hides as much of a later one."""
    if _can_forget:
        _CLEAR_REFS.write_bytes(b"5")


def _peak() -> int:
    if _can_forget:
        status = _STATUS.read_bytes()
        start = status.index(b"VmHWM:") + 6
        return int(status[start : status.index(b"kB", start)]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limit_address_space() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _ADDRESS_SPACE_ABOVE, resource.RLIM_INFINITY))


def _report(out: BinaryIO | Any, progress: Progress) -> None:
    out.write(json.dumps(asdict(progress)).encode() + b"\n")
