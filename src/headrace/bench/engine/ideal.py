"""The time a request mix would take if every step were as full as its requests permit: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Sized(NamedTuple):
    """A request as the simulation sees it."""

    prompt: int
    tokens: int
    """Sampled tokens. The first one is the prefill's; each further one takes a step."""


@dataclass(frozen=True)
class StepModel:
    """Seconds of a decode step, from measured ones: linear in the tokens attended to, interpolated in the batch."""

    batches: tuple[int, ...]
    """Batch sizes that were measured, rising."""
    base_s: tuple[float, ...]
    per_token_s: tuple[float, ...]

    @classmethod
    def fit(cls, measured: Mapping[int, Sequence[tuple[float, float]]]) -> StepModel:
        """From two measurements (mean context, seconds) at each batch size, of different contexts."""
        bases, slopes = [], []
        batches = tuple(sorted(measured))
        for batch in batches:
            (near, fast), (far, slow) = sorted(measured[batch])
            # Noise must not make a longer context cheaper.
            slope = max(0.0, (slow - fast) / (batch * (far - near)))
            slopes.append(slope)
            bases.append(fast - slope * batch * near)
        return cls(batches, tuple(bases), tuple(slopes))

    def __call__(self, batch: int, tokens: float) -> float:
        """Of `batch` sequences that attend to `tokens` positions all together."""
        base = np.interp(batch, self.batches, self.base_s)
        return float(base + np.interp(batch, self.batches, self.per_token_s) * tokens)


def ideal_decode_s(requests: Sequence[Sized], max_running: int, model: StepModel) -> tuple[float, int]:
    """(seconds, steps) until all have their tokens: at each step the first of those left, up to `max_running`."""
    waiting = [request for request in requests if request.tokens > 1]
    context = np.zeros(0)
    left = np.zeros(0, np.int64)
    seconds, steps, next_up = 0.0, 0, 0
    while next_up < len(waiting) or len(left):
        entering = waiting[next_up : next_up + max_running - len(left)]
        next_up += len(entering)
        context = np.append(context, [request.prompt for request in entering])
        left = np.append(left, [request.tokens - 1 for request in entering]).astype(np.int64)
        context += 1
        seconds += model(len(left), float(context.sum()))
        steps += 1
        left -= 1
        context, left = context[left > 0], left[left > 0]
    return seconds, steps
