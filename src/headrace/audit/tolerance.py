"""How far recomputed log-probs may be from the recorded ones.

Without FP8 every token is judged alone. FP8 rounds coarsely: a value between two of its numbers may be rounded to
either, so two ways to add up one sum may differ by an eighth. That moves one token a lot, or a little all that come
after. How often, and how far, is a matter of the model. Seen in float32: 1e-6 nats on average (the quickstart's),
1e-2 (a random one, three layers of 256), single tokens up to 0.5. So the audit measures it: every turn is replayed
once more by models that are shaken by one rounding (`kept.shaken`). Where values are rounded otherwise often, that
moved tokens at least 1.2 times as far, on average, as honest engines' were off; where it is rare, both are chance.

A wrong version or a wrong cache shows from a point of the lineage on. So tokens are judged by runs between such
points: each run by itself, and together all that began alike, say after a swap that kept the cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headrace.engine.config import NativeEngineConfig
from headrace.records import Turn

FLOAT32 = 1e-4
BFLOAT16 = 0.1
TIMES_SHAKEN = 2
"""Of what shaking does, tokens may be so many times as far off, beside what they may be off anyway."""
SHARE_LEFT_OUT = 10
"""Of a run by itself the farthest token in so many is left out, at least one."""
TIMES_ONE_TOKEN = 10
"""Of runs together none counts for more than so many times the average that is allowed: what tells is how many are
off, and a tenth must be."""


class Tolerance(NamedTuple):
    """In nats."""

    any: float
    """Of every token."""
    alone: float = math.inf
    """Of a run, on average: one value that was rounded otherwise early may move all of it."""
    alike: float = math.inf
    """Of all runs that began alike, on average, but the worst of them."""

    @property
    def needs_shaking(self) -> bool:
        return math.isfinite(self.alike)

    def broken_at(self, differences: np.ndarray, shaken: float = 0.0) -> int | None:
        """Of one run: the token that is farthest off, where they are too far off.

        `shaken` is by how much shaking moves such tokens, on average.
        """
        if not len(differences):
            return None
        farthest = int(differences.argmax())
        rest = np.sort(differences)[: -max(1, len(differences) // SHARE_LEFT_OUT)]
        fits = differences[farthest] <= self.any and _mean([rest]) <= self.alone + TIMES_SHAKEN * shaken
        return None if fits else farthest

    def broken_by(self, runs: list[np.ndarray], shaken: float = 0.0) -> bool:
        """Whether runs that began alike are too far off together, whatever each of them is."""
        level = self.alike + TIMES_SHAKEN * shaken
        clipped = [np.minimum(run, TIMES_ONE_TOKEN * level) for run in runs]
        worst = int(np.argmax([run.sum() for run in clipped]))
        return not _mean(clipped[:worst] + clipped[worst + 1 :]) <= level


def tolerance_of(engine: NativeEngineConfig) -> Tolerance:
    fp8 = "fp8" in (engine.kv_dtype, engine.weight_dtype)
    if engine.dtype == "bfloat16":
        # Estimated of honest engines: 3 nats of a token. Seen: 0.1 of a run, 4e-4 on average in the quickstart.
        return Tolerance(10.0, 0.5, 0.02) if fp8 else Tolerance(BFLOAT16)
    # Seen: 0.5 of a token, 0.06 of a run, 1e-6 on average in the quickstart, where tokens after a swap are off by
    # 2e-3 with the version before it, a third of them by more than 5e-4.
    return Tolerance(2.0, 0.25, 2e-4) if fp8 else Tolerance(FLOAT32)


class Run(NamedTuple):
    """Tokens of a turn with no point of its lineage between them."""

    kind: str
    """How it began."""
    rows: slice


def runs_of(turn: Turn, context_tokens: int) -> list[Run]:
    """In order, all of the turn's tokens. `context_tokens` lie before the first."""
    count = len(turn.tokens)
    # The pass over an event's position gives the log-prob of the token after it.
    firsts = [min(max(event.position + 1 - context_tokens, 0), count) for event in turn.lineage]
    ends = [*firsts[1:], count]
    kinds = [f"{event.cause} (cache {event.before})" for event in turn.lineage]
    return [Run(kind, slice(*rows)) for kind, *rows in zip(kinds, firsts, ends, strict=True) if rows[0] < rows[1]]


class Comparison:
    """The differences of some turns, by runs."""

    def __init__(self, tolerance: Tolerance):
        self._tolerance = tolerance
        self._turns: list[tuple[list[Run], np.ndarray]] = []
        self._alike: dict[str, list[np.ndarray]] = {}
        self._shaken: dict[str, list[np.ndarray]] = {}

    def add(self, turn: Turn, context_tokens: int, differences: np.ndarray, shaken: np.ndarray) -> None:
        """Both float32 (T,). `shaken` is what shaking does; zeros where the tolerance needs none."""
        runs = runs_of(turn, context_tokens)
        self._turns.append((runs, differences))
        for kind, rows in runs:
            self._alike.setdefault(kind, []).append(differences[rows])
            self._shaken.setdefault(kind, []).append(shaken[rows])

    def broken_turns(self) -> list[tuple[int, int]]:
        """(number of the turn, its token that is farthest off), in the order of `add`."""
        shaken = {kind: _mean(runs) for kind, runs in self._shaken.items()}
        found: list[tuple[int, int]] = []
        for number, (runs, differences) in enumerate(self._turns):
            broken = [
                rows.start + place
                for kind, rows in runs
                if (place := self._tolerance.broken_at(differences[rows], shaken[kind])) is not None
            ]
            if broken:
                found.append((number, broken[int(differences[broken].argmax())]))
        return found

    def broken_kinds(self) -> list[tuple[str, float, float]]:
        """(kind, average difference, what shaking does on average) of runs that are too far off together."""
        return [
            (kind, _mean(runs), shaken)
            for kind, runs in self._alike.items()
            if self._tolerance.broken_by(runs, shaken := _mean(self._shaken[kind]))
        ]

    @property
    def differences(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *(differences for _, differences in self._turns)])


def _mean(runs: list[np.ndarray]) -> float:
    """Of all their tokens; 0 where there are none."""
    return sum(float(run.sum()) for run in runs) / max(1, sum(map(len, runs)))
