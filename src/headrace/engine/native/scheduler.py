"""Who runs: admission by free pages, sharing of prompts, preemption. Bookkeeping and page copies; no pass here.

A prompt is computed once, as an entry of the prefix cache; sequences fork from it: they share its full pages
and get a copy of its last one where that is partly filled. When pages run out, prefix entries go first, then
the youngest running sequence gives way. Nothing waits for ever: a sequence alone can evict everything else,
take over its prompt's pages, and one of full length fits.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from headrace.engine.native.kv import KvCache
from headrace.engine.native.pages import PagePool, pages_for
from headrace.engine.native.prefix import Prefix, PrefixCache
from headrace.engine.native.requests import Sequence, note
from headrace.engine.native.slots import Slots
from headrace.errors import HeadraceError
from headrace.records import KvEvent

RUNNING_PER_RESERVED_PAGE = 8
"""Admission leaves so many pages free that what runs can grow a little, or it would be preempted at once."""


class Forked(NamedTuple):
    fresh: list[Sequence]
    hidden: list[Tensor]
    """What the fresh ones' first tokens are sampled from."""
    suffixed: list[Sequence]
    """Those that need a pass over the tokens they had sampled before they lost their cache."""


class Scheduler:
    def __init__(self, kv: KvCache, max_running: int, max_context: int, prefill_tokens: int):
        self.kv, self.page_size, self.prefill_tokens = kv, kv.page_size, prefill_tokens
        self.pool = PagePool(kv.pages)
        self.prefixes = PrefixCache(self.pool, capacity=max(64, max_running))
        self.slots = Slots(max_running, pages_for(max_context, kv.page_size))
        self.queue: deque[Sequence] = deque()

    def fork(self, version: int, only_fresh: bool) -> Forked:
        """Admit from the front of the queue those whose prompt is computed, as far as pages and slots go.

        `only_fresh` stops at one that has sampled tokens to compute again.
        """
        fresh: list[Sequence] = []
        hidden: list[Tensor] = []
        suffixed: list[Sequence] = []
        sources: list[int] = []
        targets: list[int] = []
        suffix_tokens = 0
        while self.queue and self.slots.free:
            sequence = self.queue[0]
            entry = self.prefixes.get((version, sequence.prompt))
            new = len(sequence.tokens)
            if entry is None or (new and only_fresh):
                break
            if suffixed and suffix_tokens + new > self.prefill_tokens:
                break
            assert entry.hidden is not None
            pages = self._pages_from(entry, sequence, sources, targets)
            if pages is None:
                break
            self.queue.popleft()
            self.slots.enter(sequence, pages, cached=len(sequence.context))
            _begin(sequence, version)
            suffix_tokens += new
            if new:
                suffixed.append(sequence)
            else:
                fresh.append(sequence)
                hidden.append(entry.hidden)
        if sources:
            self.kv.copy(sources, targets)
        return Forked(fresh, hidden, suffixed)

    def plan_prompts(self, version: int) -> list[Prefix]:
        """Prompts from the front of the queue to compute in one pass, their pages taken."""
        planned: dict[bytes, Prefix] = {}
        tokens = promised = 0
        for place, sequence in enumerate(self.queue):
            if place == self.slots.free:
                break
            size = len(sequence.context)
            whole = pages_for(sequence.length, self.page_size)
            promised += whole - size // self.page_size
            missing = sequence.prompt not in planned and self.prefixes.get((version, sequence.prompt)) is None
            if missing and planned and tokens + size > self.prefill_tokens:
                break
            wanted = pages_for(size, self.page_size) if missing else 0
            alone = not planned and not self.slots.running
            if not self._room(wanted + promised + self._reserve) and not (alone and self._room(whole)):
                break
            if missing:
                pages = self.pool.take(wanted)
                planned[sequence.prompt] = Prefix((version, sequence.prompt), sequence.context, pages)
                tokens += size
        return list(planned.values())

    def make_room_to_decode(self) -> None:
        """Give every running sequence a page for its next position; preempt the youngest until that works."""
        slots = self.slots
        while True:
            rows = slots.active[slots.cached[slots.active] % self.page_size == 0]
            if self._room(len(rows)):
                break
            if slots.running == 1:
                raise HeadraceError("the KV cache holds one sequence of max_context", self.pool.total)
            youngest = slots.active[np.argmax(slots.order[slots.active])]
            self.lose_cache(int(youngest), "preempt")
        if len(rows):
            slots.page_table[rows, slots.num_pages[rows]] = self.pool.take(len(rows))
            slots.num_pages[rows] += 1

    def recompute_all(self) -> None:
        """Send every running sequence to the front of the queue, the oldest first, to be rebuilt."""
        active = self.slots.active
        for slot in active[np.argsort(-self.slots.order[active])].tolist():
            self.lose_cache(slot, "swap")

    def lose_cache(self, slot: int, cause: Literal["swap", "preempt"]) -> None:
        position = int(self.slots.cached[slot])
        sequence = self.release(slot)
        sequence.lost = KvEvent(position=position, version=-1, before="recomputed", cause=cause)
        self.queue.appendleft(sequence)

    def release(self, slot: int) -> Sequence:
        """Take the sequence out of its slot and free its pages."""
        sequence, pages = self.slots.leave(slot)
        self.pool.release(pages)
        return sequence

    @property
    def _reserve(self) -> int:
        return self.slots.running // RUNNING_PER_RESERVED_PAGE

    def _room(self, pages: int, keep: Prefix | None = None) -> bool:
        """Whether so many pages are free, once enough prefixes other than `keep` are evicted."""
        while self.pool.free < pages:
            if not self.prefixes.evict(keep):
                return False
        return True

    def _pages_from(
        self, entry: Prefix, sequence: Sequence, sources: list[int], targets: list[int]
    ) -> np.ndarray | None:
        """Pages for the sequence's whole length, the prompt's in them; None when there are not enough."""
        whole = pages_for(sequence.length, self.page_size)
        full = len(entry.tokens) // self.page_size
        if self._room(whole - full + self._reserve, keep=entry):
            own = self.pool.take(whole - full)
            self.pool.share(entry.pages[:full])
            if full < len(entry.pages):
                sources.append(int(entry.pages[full]))
                targets.append(int(own[0]))
            return np.concatenate([entry.pages[:full], own])
        if not self.slots.running and self._room(whole - len(entry.pages), keep=entry):
            self.prefixes.hand_over(entry)
            return np.concatenate([entry.pages, self.pool.take(whole - len(entry.pages))])
        return None


def _begin(sequence: Sequence, version: int) -> None:
    if sequence.lost is None:
        note(sequence.lineage, KvEvent(position=0, version=version, before="kept", cause="start"))
    else:
        lost, sequence.lost = sequence.lost, None
        event = KvEvent(position=lost.position, version=version, before="recomputed", cause=lost.cause)
        note(sequence.lineage, event)
