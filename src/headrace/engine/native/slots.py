"""The running sequences' state as arrays, one row each, so that a step touches no object per sequence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.engine.base import SampleRequest
from headrace.engine.native.requests import Sequence
from headrace.engine.native.sampling import Parameters, seed_word
from headrace.records import Sampling


class Computed(NamedTuple):
    sequences: list[Sequence | None]
    """By slot."""
    cached: np.ndarray


class Slots:
    """`capacity` rows; `active` are those in use. A row's columns grow with the longest request admitted.

    A token is issued when the pass that samples it is planned, and sampled when its value has arrived.
    """

    def __init__(self, capacity: int, pages_per_sequence: int):
        self.capacity = capacity
        self.sequences: list[Sequence | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self.active = np.empty(0, np.int64)
        self.page_table = np.zeros((capacity, pages_per_sequence), np.int64)
        self.num_pages = np.zeros(capacity, np.int64)
        self.page_updates: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """(slots, places, pages) given since a runner that keeps a table of its own took them."""
        self.cached = np.zeros(capacity, np.int64)
        """Positions whose keys and values are in the cache, or are by the passes planned so far."""
        self.length = np.zeros(capacity, np.int64)
        """Tokens of the context and those issued."""
        self.issued = np.zeros(capacity, np.int64)
        self.sampled = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        self.order = np.zeros(capacity, np.int64)
        self.adapter = np.zeros(capacity, np.int32)
        """Number of the adapter, 0 for none."""
        self.last_token = np.zeros(capacity, np.int64)
        """-1 while the pass that samples it has not been collected."""
        self.pure = np.zeros(capacity, bool)
        """Whether one version of the weights computed all that is cached."""
        self.scoring = np.zeros(capacity, bool)
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

    @property
    def behind(self) -> np.ndarray:
        """Active slots that must compute keys and values before their last token can be passed."""
        wanted = self.length[self.active] - ~self.scoring[self.active]
        return self.active[self.cached[self.active] < wanted]

    @property
    def ready(self) -> np.ndarray:
        """Active slots whose next token can be sampled by passing their last one."""
        rows = self.active
        up_to_date = self.cached[rows] >= self.length[rows] - 1
        return rows[up_to_date & (self.issued[rows] < self.limit[rows])]

    def sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def enter(self, sequence: Sequence, pages: np.ndarray, cached: int) -> int:
        slot = self._free.pop()
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.active = np.append(self.active, slot)
        self._widen(sequence)
        self.num_pages[slot] = 0
        self.give_pages(np.full(len(pages), slot), np.arange(len(pages)), pages)
        count = len(sequence.tokens)
        self.cached[slot] = cached
        self.length[slot] = len(sequence.context) + count
        self.issued[slot] = self.sampled[slot] = count
        self.limit[slot] = sequence.limit
        self.order[slot] = sequence.order
        self.adapter[slot] = sequence.adapter
        self.last_token[slot] = sequence.tokens[-1] if count else sequence.context[-1]
        self.pure[slot] = True
        self.scoring[slot] = sequence.targets is not None
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        request = sequence.request
        if isinstance(request, SampleRequest):
            seed, strings, sampling = request.seed, request.stop_strings, request.sampling
        else:
            seed, strings, sampling = 0, (), Sampling(temperature=request.temperature)
        self.seed[slot] = seed_word(seed)
        self.has_stop_strings[slot] = bool(strings)
        self.parameters.temperature[slot] = sampling.temperature
        self.parameters.top_k[slot] = sampling.top_k
        self.parameters.top_p[slot] = sampling.top_p
        self.parameters.min_p[slot] = sampling.min_p
        self.tokens[slot, :count] = sequence.tokens
        self.logprobs[slot, :count] = sequence.logprobs[:count]
        self.versions[slot, :count] = sequence.versions[:count]
        return slot

    def give_pages(self, slots: np.ndarray, places: np.ndarray, pages: np.ndarray) -> None:
        """Further pages, each at a place of its slot's row."""
        self.page_table[slots, places] = pages
        np.add.at(self.num_pages, slots, 1)
        self.page_updates.append((slots, places, pages))

    def issue(self, slots: np.ndarray) -> None:
        """These slots' last tokens are passed, and one more is sampled for each."""
        self.cached[slots] = self.length[slots]
        self.length[slots] += 1
        self.issued[slots] += 1
        self.last_token[slots] = -1

    def computed(self) -> Computed:
        """How far each sequence is, before a step is planned."""
        return Computed(self.sequences.copy(), self.cached.copy())

    def take_back(self, before: Computed) -> None:
        """A planned step did not happen: nothing is in the cache but what was before, and what entered has nothing.
        Only for sequences that leave next."""
        for slot in self.active.tolist():
            same = self.sequences[slot] is before.sequences[slot]
            self.cached[slot] = before.cached[slot] if same else 0

    def leave(self, slot: int) -> tuple[Sequence, np.ndarray]:
        """(the sequence, its columns with it again; the pages it had)."""
        sequence = self.sequence(slot)
        self.sequences[slot] = sequence.slot = None
        self._free.append(slot)
        self.active = self.active[self.active != slot]
        if sequence.targets is None:
            sequence.tokens, sequence.logprobs, sequence.versions = self.columns(slot)
        return sequence, self.page_table[slot, : self.num_pages[slot]].copy()

    def columns(self, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of (tokens, log-probs, versions) sampled so far."""
        count = int(self.sampled[slot])
        return (
            self.tokens[slot, :count].copy(),
            self.logprobs[slot, :count].copy(),
            self.versions[slot, :count].copy(),
        )

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> None:
        """One sampled token for each of these rows."""
        at = self.sampled[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = versions
        self.sampled[rows] = at + 1
        newest = self.issued[rows] == at + 1
        self.last_token[rows[newest]] = tokens[newest]

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
