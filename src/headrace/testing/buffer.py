"""What every buffer does: admit within the bound, keep the promised order, and give whole batches."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import pytest

from headrace.buffer.base import Buffer, Ticket
from headrace.buffer.config import BufferConfig
from headrace.records import Group, Task
from headrace.testing.loops import on_loop

PATIENCE_S = 0.02
"""How long something that should wait is watched."""


class OpenBuffer(Protocol):
    """Makes an empty buffer. `version` is what trainer and engines have; `steps` batches are to be made."""

    def __call__(
        self,
        config: BufferConfig,
        *,
        batch_groups: int,
        version: int,
        steps: int,
        first_sequence: int = 0,
        generating: int | None = None,
        group_size: int = 1,
    ) -> Buffer: ...


class BufferContract:
    """Subclass as TestMyBuffer with a fixture `open_buffer` that gives an OpenBuffer."""

    @pytest.fixture
    def open_buffer(self) -> OpenBuffer:
        raise NotImplementedError("give a fixture `open_buffer` that returns an OpenBuffer")

    # ── Admission ────────────────────────────────────────────────────────────────────────────────────────

    @on_loop()
    async def test_none_admits_the_next_batch_when_engines_serve_what_the_last_one_made(
        self, open_buffer: OpenBuffer
    ) -> None:
        buffer = open_buffer(BufferConfig(type="none"), batch_groups=2, version=5, steps=9)
        first = await _admit_all(buffer)
        assert [(t.admitted_version, t.deadline) for t in first] == [(5, 5), (5, 5)]
        await _put(buffer, *first)
        assert await _taken(buffer) == (5, [0, 1])
        assert await _admit_all(buffer) == []
        buffer.engines_serve(6)
        assert [(t.admitted_version, t.deadline) for t in await _admit_all(buffer)] == [(6, 6), (6, 6)]

    @on_loop()
    async def test_double_admits_the_next_batch_when_one_is_taken(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(type="double"), batch_groups=2, version=5, steps=9)
        first = await _admit_all(buffer)
        assert len(first) == 2
        await _put(buffer, *first)
        assert await _admit_all(buffer) == []
        assert await _taken(buffer) == (5, [0, 1])
        second = await _admit_all(buffer)
        assert [(t.sequence, t.admitted_version, t.deadline) for t in second] == [(2, 5, 6), (3, 5, 6)]

    @on_loop()
    async def test_bounded_admits_what_the_bound_allows_and_no_more(self, open_buffer: OpenBuffer) -> None:
        for bound in (0, 1, 3):
            config = BufferConfig(type="bounded", max_staleness=bound)
            buffer = open_buffer(config, batch_groups=2, version=0, steps=99)
            tickets = await _admit_all(buffer)
            assert len(tickets) == 2 * (bound + 1)
            await _put(buffer, *tickets)
            for version in range(bound + 1):
                assert (await buffer.take())[0] == version
            assert await _admit_all(buffer) == []
            buffer.engines_serve(1)
            assert len(await _admit_all(buffer)) == 2

    @on_loop()
    async def test_depth_limits_what_the_bound_would_allow(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="bounded", max_staleness=9, depth=3)
        buffer = open_buffer(config, batch_groups=2, version=0, steps=99)
        tickets = await _admit_all(buffer)
        assert len(tickets) == 3
        await _put(buffer, *tickets)
        assert await _admit_all(buffer) == []
        assert await _taken(buffer) == (0, [0, 1])
        assert [t.sequence for t in await _admit_all(buffer)] == [3, 4]

    @on_loop()
    async def test_unbounded_admits_all_that_the_remaining_steps_can_train(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(type="unbounded"), batch_groups=3, version=2, steps=4)
        tickets = await _admit_all(buffer)
        assert [t.sequence for t in tickets] == list(range(12))
        await buffer.drop(tickets[4])
        assert [t.sequence for t in await _admit_all(buffer)] == [12]

    @on_loop()
    async def test_generating_limits_unfinished_groups_alone(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="unbounded")
        buffer = open_buffer(config, batch_groups=2, version=0, steps=9, generating=3)
        tickets = await _admit_all(buffer)
        assert len(tickets) == 3
        await _put(buffer, tickets[0])
        assert [t.sequence for t in await _admit_all(buffer)] == [3]

    @on_loop()
    async def test_generating_counts_the_episodes_that_have_not_ended(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="unbounded")
        buffer = open_buffer(config, batch_groups=2, version=0, steps=9, generating=6, group_size=4)
        tickets = await _admit_all(buffer)
        assert len(tickets) == 2
        for ticket in (*tickets, tickets[0]):
            assert await _admit_all(buffer) == []
            buffer.ended(ticket)
        assert [t.sequence for t in await _admit_all(buffer)] == [2]
        # Four, two and three still generate: what ends without having been told of counts too.
        await buffer.drop(tickets[1])
        assert await _admit_all(buffer) == []
        await _put(buffer, tickets[0])
        assert [t.sequence for t in await _admit_all(buffer)] == [3]

    @on_loop()
    async def test_sequences_go_on_where_an_earlier_session_ended(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="none")
        buffer = open_buffer(config, batch_groups=2, version=7, steps=9, first_sequence=40)
        assert [t.sequence for t in await _admit_all(buffer)] == [40, 41]

    @on_loop()
    async def test_dropping_makes_room(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(type="none"), batch_groups=2, version=0, steps=9)
        first, second = await _admit_all(buffer)
        waiting = asyncio.create_task(buffer.admit())
        assert await _waits(waiting)
        await buffer.drop(first)
        third = await waiting
        assert (third.sequence, buffer.outstanding) == (2, 2)
        await _put(buffer, third, second)
        assert await _taken(buffer) == (0, [1, 2])

    @on_loop()
    async def test_an_admission_given_up_takes_no_place(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(type="none"), batch_groups=1, version=0, steps=9)
        (ticket,) = await _admit_all(buffer)
        patient, hasty = asyncio.create_task(buffer.admit()), asyncio.create_task(buffer.admit())
        assert await _waits(hasty)
        hasty.cancel()
        await buffer.drop(ticket)
        assert (await patient).sequence == 1
        assert buffer.outstanding == 1

    # ── Batches ──────────────────────────────────────────────────────────────────────────────────────────

    @on_loop()
    async def test_groups_are_counted_where_they_are(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(), batch_groups=2, version=0, steps=9)
        tickets = await _admit_all(buffer)
        assert (buffer.outstanding, buffer.ready) == (6, 0)
        await _put(buffer, *tickets[:3])
        assert (buffer.outstanding, buffer.ready) == (6, 3)
        await buffer.take()
        assert (buffer.outstanding, buffer.ready) == (4, 1)
        await buffer.drop(tickets[5])
        assert (buffer.outstanding, buffer.ready) == (3, 1)

    @on_loop()
    async def test_a_batch_is_whole_and_versions_count_up(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(type="unbounded"), batch_groups=2, version=3, steps=9)
        tickets = await _admit_all(buffer)
        taking = asyncio.create_task(_taken(buffer))
        await _put(buffer, tickets[0])
        assert await _waits(taking)
        await _put(buffer, tickets[1])
        assert await taking == (3, [0, 1])
        await _put(buffer, *tickets[2:6])
        assert await _taken(buffer) == (4, [2, 3])
        assert await _taken(buffer) == (5, [4, 5])

    @on_loop()
    async def test_a_take_given_up_loses_no_group(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(), batch_groups=2, version=0, steps=9)
        tickets = await _admit_all(buffer)
        taking = asyncio.create_task(buffer.take())
        await _put(buffer, tickets[0])
        assert await _waits(taking)
        taking.cancel()
        await _put(buffer, tickets[1])
        assert await _taken(buffer) == (0, [0, 1])

    @on_loop()
    async def test_fifo_takes_the_oldest_and_waits_for_them(self, open_buffer: OpenBuffer) -> None:
        buffer = open_buffer(BufferConfig(order="fifo"), batch_groups=2, version=0, steps=9)
        tickets = await _admit_all(buffer)
        taking = asyncio.create_task(_taken(buffer))
        await _put(buffer, *tickets[1:])
        assert await _waits(taking)
        await _put(buffer, tickets[0])
        assert await taking == (0, [0, 1])

    @on_loop()
    async def test_windowed_takes_the_first_finished_of_the_oldest(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="unbounded", order="windowed", window=3)
        buffer = open_buffer(config, batch_groups=2, version=0, steps=9)
        tickets = await _admit_all(buffer)
        taking = asyncio.create_task(_taken(buffer))
        await _put(buffer, tickets[3], tickets[2])
        assert await _waits(taking)
        await _put(buffer, tickets[1])
        assert await taking == (0, [1, 2])
        await _put(buffer, tickets[0])
        assert await _taken(buffer) == (1, [0, 3])

    @on_loop()
    async def test_first_finished_takes_whatever_finished_first(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="unbounded", order="first_finished")
        buffer = open_buffer(config, batch_groups=2, version=0, steps=9)
        tickets = await _admit_all(buffer)
        await _put(buffer, *(tickets[i] for i in (9, 4, 0, 1)))
        assert sorted((await _taken(buffer))[1]) == [4, 9]
        assert sorted((await _taken(buffer))[1]) == [0, 1]

    # ── Lateness ─────────────────────────────────────────────────────────────────────────────────────────

    @on_loop()
    async def test_the_bound_outranks_the_order_and_the_trainer_waits(self, open_buffer: OpenBuffer) -> None:
        config = BufferConfig(type="bounded", max_staleness=1, order="first_finished")
        buffer = open_buffer(config, batch_groups=2, version=0, steps=9)
        late: list[Ticket] = []
        buffer.on_late = late.append
        tickets = await _admit_all(buffer)
        await _put(buffer, tickets[2], tickets[3])
        assert await _taken(buffer) == (0, [2, 3])
        buffer.engines_serve(1)
        newer = await _admit_all(buffer)
        await _put(buffer, *newer)
        taking = asyncio.create_task(_taken(buffer))
        assert await _waits(taking), "groups 0 and 1 have to be trained at version 1"
        await _put(buffer, tickets[0], tickets[1])
        assert await taking == (1, [0, 1])
        assert late == []

    @on_loop()
    async def test_late_groups_are_told_of_once_each_when_others_could_be_trained(
        self, open_buffer: OpenBuffer
    ) -> None:
        config = BufferConfig(type="bounded", max_staleness=1, order="first_finished", late="drop")
        buffer = open_buffer(config, batch_groups=2, version=0, steps=9)
        late: list[Ticket] = []
        buffer.on_late = late.append
        tickets = await _admit_all(buffer)
        await _put(buffer, tickets[2], tickets[3])
        await buffer.take()
        buffer.engines_serve(1)
        newer = await _admit_all(buffer)
        taking = asyncio.create_task(_taken(buffer))
        await _put(buffer, newer[0])
        assert await _waits(taking)
        assert late == [], "one finished group makes no batch: nothing is gained by dropping"
        await _put(buffer, newer[1])
        assert await _waits(taking)
        assert late == tickets[:2]
        await buffer.drop(tickets[0])
        assert await _waits(taking)
        assert late == tickets[:2]
        await _put(buffer, tickets[1])
        version, groups = await taking
        assert (version, len(groups), groups[0]) == (1, 2, 1)


# ── Steps of the tests ───────────────────────────────────────────────────────────────────────────────────


async def _admit_all(buffer: Buffer) -> list[Ticket]:
    """Admit until the next admission would wait."""
    tickets: list[Ticket] = []
    while True:
        admission = asyncio.create_task(buffer.admit())
        if await _waits(admission):
            admission.cancel()
            await asyncio.wait({admission})
            return tickets
        tickets.append(admission.result())


async def _put(buffer: Buffer, *tickets: Ticket) -> None:
    for ticket in tickets:
        task = Task(id=str(ticket.sequence), prompt="")
        await buffer.put(ticket, Group(id=f"g{ticket.sequence}", sequence=ticket.sequence, task=task))


async def _taken(buffer: Buffer) -> tuple[int, list[int]]:
    """The next batch's version and its groups' sequences."""
    version, groups = await buffer.take()
    return version, [group.sequence for group in groups]


async def _waits(task: asyncio.Task[Any]) -> bool:
    await asyncio.wait({task}, timeout=PATIENCE_S)
    return not task.done()
