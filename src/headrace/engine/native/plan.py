"""What one step does, as data: the scheduler writes it, a runner carries it out."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.engine.native.sampling import Sampled


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence whose keys and values are computed in this step."""

    slot: int
    first: int
    """Position of the first of `tokens`."""
    tokens: np.ndarray
    """int32."""
    samples: bool
    """Whether a token is sampled after the last of them."""
    targets: np.ndarray
    """int32: tokens to score, the last of them after the chunk's last token. Mostly none."""

    @property
    def last(self) -> int:
        return self.first + len(self.tokens)


@dataclass(slots=True)
class Plan:
    rows: np.ndarray
    """Slots that pass one token each."""
    tokens: np.ndarray
    """That token, or -1: the one last sampled for the slot, which only the runner knows yet."""
    positions: np.ndarray
    writes: np.ndarray
    """False where the token's keys and values are in the cache already and only its logits are wanted."""
    chunks: list[Chunk]
    twins: list[int]
    """Slots of chunks from whose last logits a further sequence's token is sampled, too; one for each such."""
    samples: np.ndarray
    """Slots a token is sampled for: `rows`, then the chunks that sample, then the further ones of `twins`."""
    indices: np.ndarray
    """Of each sample: which of its sequence's tokens it is, from 0."""
    copies: tuple[list[int], list[int]]
    """Pages to copy, (from, to), before anything else."""
    later_copies: tuple[list[int], list[int]]
    """Pages to copy after the passes."""

    @property
    def chunk_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Outcome(NamedTuple):
    """What a step's passes gave."""

    sampled: Sampled
    """One row for each of the plan's samples."""
    scores: list[np.ndarray]
    """float32 log-probs of each chunk's targets, for chunks that have any."""


class Running(Protocol):
    """A step whose passes were begun."""

    def outcome(self) -> Outcome:
        """Waits for the passes."""
        ...


class Runner(Protocol):
    """Carries plans out, in order, over the model, the cache and the slots it was made with."""

    ahead: int
    """Steps that may be begun before the outcome of the first of them is asked for."""

    gaps: deque[float]
    """Seconds between a step's beginning on the device and the end of the one before, where the runner can tell."""

    def scope(self) -> AbstractContextManager[Any]:
        """Everything that touches the weights or the cache happens within."""
        ...

    def begin(self, plan: Plan) -> Running: ...

    def synchronize(self) -> None:
        """Wait until everything that was begun is done."""
        ...
