"""The buffer in the controller's memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from headrace.buffer import staleness
from headrace.buffer.base import Ticket
from headrace.buffer.config import BufferConfig
from headrace.errors import LawBroken
from headrace.records import Group


@dataclass
class _Entry:
    ticket: Ticket
    generating: int
    """Episodes that still need the engines."""
    group: Group | None = None
    finished: int | None = None
    told_late: bool = False


class MemoryBuffer:
    """None, double, bounded and unbounded are one code path: a bound, a capacity and a window."""

    def __init__(
        self,
        config: BufferConfig,
        *,
        batch_groups: int,
        version: int,
        steps: int,
        first_sequence: int = 0,
        generating: int | None = None,
        group_size: int = 1,
    ):
        """`version` is what trainer and engines have now; `steps` batches are to be made in all.

        No group is admitted while `generating` episodes or more, `group_size` of each, need the engines: what these
        can work on. Groups would be the wrong measure: of most only the longest episode still runs.
        """
        self.on_late: Callable[[Ticket], None] = lambda ticket: None
        self._batch = batch_groups
        self._bound = config.staleness_bound
        self._capacity = config.capacity(batch_groups)
        self._window = config.window_groups(batch_groups)
        self._drop_late = config.late == "drop"
        self._most_generating, self._group_size = generating, group_size
        self._generating = 0
        self._engine_version = version
        self._next_version = version
        self._last_version = version + steps
        self._entries: dict[int, _Entry] = {}
        self._ready = 0
        self._sequence = itertools.count(first_sequence)
        self._finish_order = itertools.count()
        self._changed: list[asyncio.Future[None]] = []

    async def admit(self) -> Ticket:
        while not self._admissible():
            await self._change()
        ticket = Ticket(
            sequence=next(self._sequence),
            admitted_version=self._engine_version,
            deadline=staleness.deadline(self._engine_version, self._bound),
        )
        self._entries[ticket.sequence] = _Entry(ticket, self._group_size)
        self._generating += self._group_size
        return ticket

    def ended(self, ticket: Ticket) -> None:
        self._ended(self._entries[ticket.sequence], 1)
        self._notify()

    async def put(self, ticket: Ticket, group: Group) -> None:
        entry = self._entries[ticket.sequence]
        entry.group, entry.finished = group, next(self._finish_order)
        self._ended(entry, entry.generating)
        self._ready += 1
        self._notify()

    async def drop(self, ticket: Ticket) -> None:
        entry = self._entries.pop(ticket.sequence)
        self._ended(entry, entry.generating)
        if entry.group is not None:
            self._ready -= 1
        self._notify()

    async def take(self) -> tuple[int, list[Group]]:
        while True:
            entries = list(self._entries.values())
            choice = staleness.choose(
                [e.ticket.deadline for e in entries],
                [e.finished for e in entries],
                batch=self._batch,
                version=self._next_version,
                window=self._window,
            )
            if choice.take:
                return self._leave([entries[i] for i in choice.take])
            if self._drop_late and self.ready >= self._batch:
                for i in choice.late:
                    if not entries[i].told_late:
                        entries[i].told_late = True
                        self.on_late(entries[i].ticket)
            await self._change()

    def engines_serve(self, version: int) -> None:
        self._engine_version = max(self._engine_version, version)
        self._notify()

    @property
    def ready(self) -> int:
        return self._ready

    @property
    def outstanding(self) -> int:
        return len(self._entries)

    def _admissible(self) -> bool:
        left = (self._last_version - self._next_version) * self._batch
        if self._most_generating is not None and self._generating >= self._most_generating:
            return False
        return len(self._entries) < left and staleness.admissible(
            len(self._entries),
            batch=self._batch,
            next_version=self._next_version,
            deadline=staleness.deadline(self._engine_version, self._bound),
            capacity=self._capacity,
        )

    def _ended(self, entry: _Entry, episodes: int) -> None:
        entry.generating -= episodes
        self._generating -= episodes

    def _leave(self, chosen: list[_Entry]) -> tuple[int, list[Group]]:
        version, groups = self._next_version, []
        for entry in chosen:
            if entry.ticket.deadline < version:
                what = f"deadline {entry.ticket.deadline}, trained at {version}"
                raise LawBroken("staleness bound", f"group {entry.ticket.sequence}", what)
            assert entry.group is not None
            groups.append(entry.group)
            del self._entries[entry.ticket.sequence]
        self._ready -= len(chosen)
        self._next_version += 1
        self._notify()
        return version, groups

    async def _change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(future)
        await future

    def _notify(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)
        self._changed.clear()
