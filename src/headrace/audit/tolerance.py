"""How far a recomputed log-prob may be from the recorded one.

FP8 rounds coarsely, and a value that lies between two of its numbers may be rounded to either: two ways to add up
the same sum then differ by an eighth of that value. It happens to few values, and shows in few tokens, or a little
in all that come after; a wrong version, or a wrong cache, shows in nearly all of a turn's. So with FP8 it is not
every token that has to agree, but most of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from headrace.engine.config import NativeEngineConfig

FLOAT32 = 1e-4
BFLOAT16 = 0.1
AFTER_A_FLIP = 5e-4
"""In float32 with FP8: ten times the largest median seen of a turn in which a value was rounded otherwise."""
FLIPPED = 0.5
"""Likewise of a single token: three times the largest difference seen."""


class Tolerance(NamedTuple):
    """Both in nats."""

    most: float
    """Of all of a turn's tokens but half of them, or one."""
    any: float
    """Of every token."""

    def broken_at(self, differences: np.ndarray) -> int | None:
        """The token that is farthest off, where the differences are too large."""
        beyond = int((~(differences <= self.most)).sum())
        if beyond and (beyond > max(1, len(differences) // 2) or not differences.max() <= self.any):
            return int(differences.argmax())
        return None

    def broken_by_all(self, differences: np.ndarray) -> bool:
        """Of all turns' tokens: where each turn is too short to tell, too many of them may still be off."""
        beyond = int((~(differences <= self.most)).sum())
        return beyond > max(1, len(differences) // 4)


def tolerance_of(engine: NativeEngineConfig) -> Tolerance:
    fp8 = "fp8" in (engine.kv_dtype, engine.weight_dtype)
    if engine.dtype == "bfloat16":
        return Tolerance(BFLOAT16, math.inf if fp8 else BFLOAT16)
    return Tolerance(AFTER_A_FLIP, FLIPPED) if fp8 else Tolerance(FLOAT32, FLOAT32)
