"""Who runs: admission by free pages, sharing of beginnings, chunks of prompts, preemption. No pass happens here.

A step passes the last token of every sequence that is up to date, and chunks of those that are not, oldest
first, up to `prefill_tokens`. What others have computed is shared: full pages as they are, a partly filled one
as a copy; never between sequences of different adapters. Of several waiting sequences with one prompt the first
computes it; the others wait for that and sample their first token from the same logits.

When pages run out, kept beginnings go first, then what ended sequences hold for forks. One that would enter waits
for what runs then; to go on with that, what waiting forks share goes next, and then the youngest running sequence
gives way. Nothing goes that frees no page. Nothing waits for ever: a sequence alone can evict everything else, and
one of full length fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from headrace.engine.native.kv import KvCache
from headrace.engine.native.pages import PagePool, pages_for
from headrace.engine.native.plan import Chunk, Plan
from headrace.engine.native.requests import Sequence, Served, Shared, lineage_until, note
from headrace.engine.native.slots import Slots
from headrace.engine.native.tree import PageTree
from headrace.errors import HeadraceError
from headrace.records import KvEvent

RUNNING_PER_RESERVED_PAGE = 8
"""Admission leaves so many pages free that what runs can grow a little, or it would be preempted at once."""
SHARE_FILLED_AT_ONCE = 32
"""One slot in so many: at most this share stands empty for it."""
WORTH_COPYING = 2
"""A page is copied for this part of its tokens, or for what is wanted to the last token: less is soon computed."""
NO_TARGETS = np.empty(0, np.int32)


class Scheduler:
    """`settle` collects the outcomes of the steps under way and says whether there were any: only then is it
    known which sequences ended, and what a preempted one has sampled."""

    def __init__(
        self, kv: KvCache, max_running: int, max_context: int, prefill_tokens: int, settle: Callable[[], bool]
    ):
        self.kv, self.page_size, self.prefill_tokens = kv, kv.page_size, prefill_tokens
        self.pool = PagePool(kv.pages)
        self.tree = PageTree(self.pool, kv.page_size)
        self.slots = Slots(max_running, pages_for(max_context, kv.page_size))
        self.queue: deque[Sequence] = deque()
        self.held: dict[int, Sequence] = {}
        """Ended sequences whose pages are kept for forks, by request, in the order of their ends."""
        self._settle = settle
        self._computing: dict[tuple[int, bytes], int] = {}
        """Prompts that a running sequence is about to have computed, and its slot."""

    # ── A step ───────────────────────────────────────────────────────────────────────────────────────────

    def plan(self, versions: np.ndarray, *, admit: bool = True, but: int | None = None) -> Plan | None:
        """The next step, taken as begun: slots count its passes as done. None when there is nothing to do.

        `versions` are those served, of the base weights and of each adapter by its number. Nothing new is admitted
        of adapter `but`.
        """
        doors = _Doors(versions, admit, but)
        preempted = self._make_room_to_decode()
        copies: tuple[list[int], list[int]] = ([], [])
        if not preempted and (self._worth_admitting or not admit):
            self._admit(doors, *copies)
        rows = self.slots.ready
        chunks = self._chunks()
        if not len(rows) and not chunks:
            return None
        slots = self.slots
        tokens, positions = slots.last_token[rows], slots.length[rows] - 1
        writes = slots.cached[rows] < slots.length[rows]
        for chunk in chunks:
            slots.cached[chunk.slot] = chunk.last
            self._keep_beginning(chunk)
        later: tuple[list[int], list[int]] = ([], [])
        twins = self._admit_twins(doors, chunks, *later) if admit and not preempted else {}
        sampling = [chunk.slot for chunk in chunks if chunk.samples]
        samples = np.array([*rows.tolist(), *sampling, *twins], np.int64)
        indices = slots.issued[samples]
        slots.issue(samples)
        return Plan(rows, tokens, positions, writes, chunks, list(twins.values()), samples, indices, copies, later)

    def _chunks(self) -> list[Chunk]:
        slots, left, chunks = self.slots, self.prefill_tokens, []
        behind = slots.behind
        for slot in behind[np.argsort(slots.order[behind], kind="stable")].tolist():
            if left <= 0:
                break
            sequence, first = slots.sequence(slot), int(slots.cached[slot])
            last = min(int(slots.length[slot]), first + left)
            left -= last - first
            whole = last == slots.length[slot]
            targets = NO_TARGETS
            if sequence.targets is not None:
                start = sequence.length - len(sequence.targets)
                targets = sequence.targets[max(first - start, 0) : max(last - start, 0)]
            tokens = sequence.whole()[first:last]
            chunks.append(Chunk(slot, first, tokens, whole and sequence.targets is None, targets))
        return chunks

    def _keep_beginning(self, chunk: Chunk) -> None:
        """Once a prompt is whole, let others share it."""
        sequence = self.slots.sequence(chunk.slot)
        if chunk.last < sequence.length:
            return
        if self._computing.get(sequence.prompt) == chunk.slot:
            del self._computing[sequence.prompt]
        self._keep(chunk.slot, sequence.whole())

    def _keep(self, slot: int, tokens: np.ndarray) -> None:
        known = min(len(tokens), int(self.slots.cached[slot]))
        if self.slots.pure[slot] and known:
            pages = self.slots.page_table[slot, : pages_for(known, self.page_size)]
            self.tree.insert(tokens[:known], pages, int(self.slots.adapter[slot]))

    # ── Admission ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _worth_admitting(self) -> bool:
        """A step with prompts costs more than one without: when slots are scarce, fill several at once."""
        return self.slots.free >= min(len(self.queue), self.slots.capacity // SHARE_FILLED_AT_ONCE)

    def _admit(self, doors: _Doors, sources: list[int], targets: list[int]) -> None:
        waiting: list[Sequence] = []
        borrowed: list[int] = []
        slots_wanted = 0
        while self.queue and self.slots.free > slots_wanted:
            sequence = self.queue.popleft()
            computing = sequence.shared is None and sequence.prompt in self._computing
            if computing or not doors.open_to(sequence):
                waiting.append(sequence)
                # Others may have those of what waits for its adapter's swap.
                slots_wanted += computing or not doors.new
            elif not self._enter(sequence, doors, sources, targets, borrowed):
                self.queue.appendleft(sequence)
                break
        self.queue.extendleft(reversed(waiting))
        # Only now: a page may not be given to another before it was copied. Several may have borrowed one.
        for page in borrowed:
            self.pool.release(np.array([page]))

    def _admit_twins(
        self, doors: _Doors, chunks: list[Chunk], sources: list[int], targets: list[int]
    ) -> dict[int, int]:
        """Slots of waiting sequences whose whole context this step computes for another, and that one's slot: their
        first token is sampled from the same logits."""
        done = [chunk.slot for chunk in chunks if chunk.samples and self.slots.pure[chunk.slot]]
        leaders = {self.slots.sequence(slot).prompt: slot for slot in done if not self.slots.issued[slot]}
        twins: dict[int, int] = {}
        others: list[Sequence] = []
        borrowed: list[int] = []
        while leaders and self.queue and self.slots.free and len(others) < self.slots.capacity:
            sequence = self.queue.popleft()
            plain = sequence.shared is None and sequence.targets is None and not sequence.preempted
            leader = leaders.get(sequence.prompt) if plain and not len(sequence.tokens) else None
            if leader is None or not doors.open_to(sequence):
                others.append(sequence)
                continue
            if not self._enter(sequence, doors, sources, targets, borrowed):
                self.queue.appendleft(sequence)
                break
            slot = sequence.slot
            assert slot is not None
            if self.slots.cached[slot] == self.slots.length[slot]:
                twins[slot] = leader
        self.queue.extendleft(reversed(others))
        for page in borrowed:
            self.pool.release(np.array([page]))
        return twins

    def _enter(
        self, sequence: Sequence, doors: _Doors, sources: list[int], targets: list[int], borrowed: list[int]
    ) -> bool:
        served = Served.now(doors.versions, sequence.adapter)
        full, tail_page, cached = self._found(sequence, served)
        tail = np.array([] if tail_page is None else [tail_page], np.int64)
        self.pool.share(full)
        self.pool.share(tail)
        missing = pages_for(sequence.length, self.page_size) - len(full)
        reserve = self.slots.running // RUNNING_PER_RESERVED_PAGE
        if not self._room_to_enter(missing + reserve):
            self.pool.release(full)
            self.pool.release(tail)
            if self.slots.running:
                return False
            # One that needs the whole cache has no room for what it would copy, or for more than it uses of a fork.
            self._abandon(sequence)
            full, tail_page, cached = full[:0], None, 0
            missing = pages_for(sequence.length, self.page_size)
            if not self._room_to_enter(missing):
                return False
        own = self.pool.take(missing)
        if tail_page is not None:
            sources.append(tail_page)
            targets.append(int(own[0]))
            borrowed.append(tail_page)
        slot = self.slots.enter(sequence, np.concatenate([full, own]), cached)
        self._note_begin(sequence, slot, served, cached)
        if cached < len(sequence.context) - 1:
            self._computing.setdefault(sequence.prompt, slot)
        return True

    def _found(self, sequence: Sequence, served: Served) -> tuple[np.ndarray, int | None, int]:
        """(full pages to share, page to copy, positions they hold together) of what is computed already."""
        if sequence.shared is not None:
            shared = sequence.shared
            # Under other weights the last position is computed again, for the next token's logits.
            cached = shared.cached if shared.served == served else min(shared.cached, sequence.length - 1)
            full = cached // self.page_size
            return shared.pages[:full], int(shared.pages[full]) if cached % self.page_size else None, cached
        match = self.tree.match(sequence.whole()[: sequence.reusable], sequence.adapter)
        full = len(match.pages) * self.page_size
        cached = full + match.tail
        if match.tail_page is None or (cached < sequence.reusable and match.tail < self.page_size // WORTH_COPYING):
            return match.pages, None, full
        return match.pages, match.tail_page, cached

    def _note_begin(self, sequence: Sequence, slot: int, served: Served, cached: int) -> None:
        if sequence.shared is not None and cached:
            self.slots.pure[slot] = all(Served.of(event) == served for event in sequence.lineage)
            if sequence.shared.served != served:
                note(sequence.lineage, served.event(cached, "kept", "fork"))
        elif sequence.lost is not None:
            note(sequence.lineage, served.event(sequence.lost.position, "recomputed", sequence.lost.cause))
        else:
            sequence.lineage = [served.event(0, "kept", "start")]
        sequence.lost = None
        self._give_up(sequence)

    # ── Room ─────────────────────────────────────────────────────────────────────────────────────────────

    def _make_room_to_decode(self) -> bool:
        """Give every sequence that is up to date a page for its next position; preempt the youngest until that
        works. Says whether it came to that."""
        slots, preempted = self.slots, False
        while True:
            rows = slots.ready
            rows = rows[slots.length[rows] > slots.num_pages[rows] * self.page_size]
            if self._room(len(rows)):
                break
            if self._settle() or self._drop_held(forks_too=True):
                continue
            if slots.running == 1:
                raise HeadraceError("the KV cache holds one sequence of max_context", self.pool.total)
            self.lose_cache(int(slots.active[np.argmax(slots.order[slots.active])]), "preempt")
            preempted = True
        if len(rows):
            slots.give_pages(rows, slots.num_pages[rows], self.pool.take(len(rows)))
        return preempted

    def _room(self, pages: int) -> bool:
        """Whether so many pages are free, once kept beginnings went; all stay where that would not be enough."""
        missing = pages - self.pool.free
        if missing <= 0:
            return True
        if missing > self.pool.in_use_only(self.tree.references).sum():
            return False
        if self.tree.evict(missing) < missing:
            # What nobody uses led to what is in use.
            self.tree.prune()
        return True

    def _room_to_enter(self, pages: int) -> bool:
        """Likewise once pages held for forks went, too: by what has ended or, where nothing runs, by forks."""
        if self._room(pages):
            return True
        forks_too = not self.slots.running
        if pages - self.pool.free > self._freed_by(self._held(forks_too)).sum():
            return False
        while not self._room(pages):
            if not self._drop_held(forks_too=forks_too):
                return False
        return True

    def _drop_held(self, *, forks_too: bool) -> bool:
        """Release the pages of an ended sequence, or else of a waiting fork: of one that has a page which only such
        and the kept beginnings have. False where there is none."""
        for holders in (self._held(), self._held(forks_too)):
            freed = self._freed_by(holders)
            for sequence, pages in holders:
                if freed[pages].any():
                    self._abandon(sequence)
                    return True
        return False

    def _held(self, forks_too: bool = False) -> list[tuple[Sequence, np.ndarray]]:
        """Who could do without its pages, and those: what ended first, …, the fork that is to be admitted next."""
        forks = reversed(self.queue) if forks_too else ()
        holders = (*self.held.values(), *forks)
        return [(sequence, sequence.shared.pages) for sequence in holders if sequence.shared is not None]

    def _freed_by(self, holders: list[tuple[Sequence, np.ndarray]]) -> np.ndarray:
        """Bool, of every page: whether it is free once these and the kept beginnings have given it up."""
        references = self.tree.references.copy()
        for _, pages in holders:
            references[pages] += 1
        return self.pool.in_use_only(references)

    def _abandon(self, sequence: Sequence) -> None:
        """Let a waiting fork, or those of a held sequence, compute its whole context itself."""
        if sequence.shared is not None:
            self._give_up(sequence)
            sequence.lineage = []

    def _give_up(self, sequence: Sequence) -> None:
        if sequence.shared is not None:
            self.pool.release(sequence.shared.pages)
            sequence.shared = None

    # ── Leaving ──────────────────────────────────────────────────────────────────────────────────────────

    def lose_cache(self, slot: int, cause: Literal["swap", "preempt", "sleep"]) -> None:
        """Send a running sequence to the front of the queue, to be rebuilt. Nothing of it may be under way."""
        position = int(self.slots.cached[slot])
        sequence = self.release(slot)
        if len(sequence.tokens):
            # One that was still being rebuilt has not reached the position up to which it lost its cache.
            position = max(position, sequence.lineage[-1].position)
            sequence.lost = KvEvent(position=position, version=-1, before="recomputed", cause=cause)
        self.queue.appendleft(sequence)

    def lose_everything(self, cause: Literal["preempt", "sleep"] = "sleep") -> None:
        """Have no page in use: the cache is gone. Nothing may be under way."""
        for slot in self.by_age():
            self.lose_cache(slot, cause)
        self.give_up_shared(lambda sequence: True)
        self.forget_beginnings()

    def release(self, slot: int, *, hold: bool = False) -> Sequence:
        """Take the sequence out of its slot; its pages are kept as a beginning, or held for forks, or free."""
        slots = self.slots
        cached = min(int(slots.cached[slot]), int(slots.length[slot]))
        sequence, pages = slots.leave(slot)
        self._keep(slot, sequence.whole())
        if self._computing.get(sequence.prompt) == slot:
            del self._computing[sequence.prompt]
        if hold:
            cached = min(cached, sequence.length)
            served = Served.of(lineage_until(sequence.lineage, cached)[-1])
            sequence.shared = Shared(pages, cached, served)
            self._hold(sequence)
        else:
            self.pool.release(pages)
        return sequence

    def take_over(self, other: Scheduler) -> None:
        """Go on with what waits for, and what is held by, one whose cache is gone."""
        self.queue, self.held = other.queue, other.held

    @property
    def preempted(self) -> list[Sequence]:
        return [sequence for sequence in self.queue if sequence.preempted]

    def drop(self, sequence: Sequence, *, hold: bool = False) -> None:
        """Take a waiting sequence out of the queue; what it shares is held for forks, or given up."""
        self.queue.remove(sequence)
        if hold:
            self._hold(sequence)
        else:
            self._give_up(sequence)

    def give_up_shared(self, which: Callable[[Sequence], bool]) -> None:
        """Let these waiting forks compute their whole context themselves, and forks to come of these held ones."""
        for sequence in filter(which, (*self.queue, *self.held.values())):
            if sequence.shared is not None:
                self._abandon(sequence)

    def _hold(self, sequence: Sequence) -> None:
        self.unhold(sequence.request.id)
        self.held[sequence.request.id] = sequence

    def unhold(self, request_id: int) -> None:
        sequence = self.held.pop(request_id, None)
        if sequence is not None:
            self._give_up(sequence)

    def forget_beginnings(self, adapter: int | None = None) -> None:
        """Nothing computed so far, or nothing of this adapter's, may be shared any more: other weights are served,
        or the cache is gone."""
        self.tree.clear(adapter)
        for prompt in [prompt for prompt in self._computing if adapter in (None, prompt[0])]:
            del self._computing[prompt]

    def by_age(self) -> list[int]:
        """Active slots, the youngest first."""
        active = self.slots.active
        return active[np.argsort(-self.slots.order[active])].tolist()


class _Doors(NamedTuple):
    """Who may enter a step, and under which weights."""

    versions: np.ndarray
    new: bool
    but: int | None

    def open_to(self, sequence: Sequence) -> bool:
        """What was preempted returns in any case."""
        return sequence.preempted or (self.new and sequence.adapter != self.but)
