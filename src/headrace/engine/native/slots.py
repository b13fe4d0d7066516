"""The running sequences' state as arrays, one row each, so that a step touches no object per sequence."""

from __future__ import annotations

import numpy as np

from headrace.engine.native.requests import Sequence
from headrace.engine.native.sampling import Parameters, seed_word


class Slots:
    """`capacity` rows; `active` are those in use. A row's columns grow with the longest request admitted."""

    def __init__(self, capacity: int, pages_per_sequence: int):
        self.sequences: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self.active = np.empty(0, np.int64)
        self.page_table = np.zeros((capacity, pages_per_sequence), np.int64)
        self.num_pages = np.zeros(capacity, np.int64)
        self.cached = np.zeros(capacity, np.int64)
        """Positions whose keys and values are in the cache."""
        self.sampled = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.order = np.zeros(capacity, np.int64)
        self.last_token = np.zeros(capacity, np.int64)
        self.seed = np.zeros(capacity, np.uint64)
        self.has_stop_strings = np.zeros(capacity, bool)
        self.stop_ids = np.full((capacity, 1), -1, np.int64)
        """Padded with -1, which is no token."""
        self.parameters = Parameters(
            temperature=np.ones(capacity, np.float64),
            top_k=np.zeros(capacity, np.int64),
            top_p=np.ones(capacity, np.float64),
            min_p=np.zeros(capacity, np.float64),
        )
        self.tokens = np.zeros((capacity, 64), np.int32)
        self.logprobs = np.zeros((capacity, 64), np.float32)
        self.versions = np.zeros((capacity, 64), np.int32)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def running(self) -> int:
        return len(self.active)

    def enter(self, sequence: Sequence, pages: np.ndarray, cached: int) -> int:
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.active = np.append(self.active, slot)
        self._widen(sequence)
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.cached[slot] = cached
        self.limit[slot] = sequence.limit
        self.order[slot] = sequence.order
        self.seed[slot] = seed_word(sequence.request.seed)
        self.has_stop_strings[slot] = bool(sequence.request.stop_strings)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        sampling = sequence.request.sampling
        self.parameters.temperature[slot] = sampling.temperature
        self.parameters.top_k[slot] = sampling.top_k
        self.parameters.top_p[slot] = sampling.top_p
        self.parameters.min_p[slot] = sampling.min_p
        count = len(sequence.tokens)
        self.sampled[slot] = count
        self.tokens[slot, :count] = sequence.tokens
        self.logprobs[slot, :count] = sequence.logprobs
        self.versions[slot, :count] = sequence.versions
        return slot

    def leave(self, slot: int) -> tuple[Sequence, np.ndarray]:
        """(the sequence, its columns with it again; the pages it had)."""
        sequence = self.sequences[slot]
        assert sequence is not None
        self.sequences[slot] = sequence.slot = None
        self._free.append(slot)
        self.active = self.active[self.active != slot]
        count = int(self.sampled[slot])
        sequence.tokens = self.tokens[slot, :count].copy()
        sequence.logprobs = self.logprobs[slot, :count].copy()
        sequence.versions = self.versions[slot, :count].copy()
        return sequence, self.page_table[slot, : self.num_pages[slot]].copy()

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """One sampled token for each of these rows."""
        at = self.sampled[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.last_token[rows] = tokens
        self.sampled[rows] = at + 1

    def _widen(self, sequence: Sequence) -> None:
        width = self.tokens.shape[1]
        if sequence.limit > width:
            more = ((0, 0), (0, max(sequence.limit, 2 * width) - width))
            self.tokens = np.pad(self.tokens, more)
            self.logprobs = np.pad(self.logprobs, more)
            self.versions = np.pad(self.versions, more)
        missing = len(sequence.stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
