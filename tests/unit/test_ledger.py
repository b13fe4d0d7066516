"""The ledger's sums, its order of durability, and what a crash leaves."""

from __future__ import annotations

import asyncio
import sqlite3

import numpy as np
import pytest

from headrace.errors import DeadlineExceeded, LawBroken, RunFolderError
from headrace.ledger import LOST_IN_CRASH, LOST_WITH_LEDGER, ORPHANED, Journal, Ledger, Lost
from headrace.records import Batch, Episode, Group, Task, Turn, WeightVersion

TASK = Task(id="t", prompt="p")


def trained_batch(names: list[str], *, version: int, tokens: int = 3) -> Batch:
    turn = Turn(
        tokens=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.full(tokens, version, np.int32),
        context=np.zeros(1, np.int32),
        stop="end",
    )
    episodes = tuple(Episode(id=name, task=TASK, turns=(turn,), reward=1.0) for name in names)
    group = Group(id="g", sequence=0, task=TASK, episodes=episodes)
    return Batch(step=version + 1, version=version, groups=(group,), advantages=np.zeros(len(names), np.float32))


class DirectStore:
    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    async def apply(self, changes):
        self.ledger.apply(changes)


def run_session(ledger: Ledger, work) -> None:
    async def main():
        session = ledger.recover(None) if not ledger.query("SELECT 1 FROM sessions") else 1
        journal = Journal(DirectStore(ledger), session=session)
        await work(journal)

    asyncio.run(main())


async def one_step(journal: Journal) -> None:
    journal.version(WeightVersion(number=0, parent=None, step=0))
    journal.admit("g0", 0, "t", 0, ["a", "b", "c"])
    journal.receive("a", 3)
    journal.receive("b", 3)
    journal.receive("c", 2)
    journal.drop("c", "scorer_error")
    journal.train(trained_batch(["a", "b"], version=0), WeightVersion(number=1, parent=0, step=1))
    journal.admit("g1", 1, "t", 1, ["d"])
    journal.receive("d", 4)
    journal.check()
    await journal.flush()


def test_the_sums_add_up_over_episodes_and_tokens():
    ledger = Ledger(":memory:")
    run_session(ledger, one_step)
    assert ledger.sums() == {
        "admitted": 4,
        "trained": 2,
        "in_flight": 1,
        "dropped": {"scorer_error": 1},
        "tokens": {"admitted": 12, "trained": 6, "in_flight": 4, "dropped": {"scorer_error": 2}},
    }


def test_after_a_crash_what_was_in_flight_is_dropped_as_lost():
    ledger = Ledger(":memory:")
    run_session(ledger, one_step)
    assert ledger.recover(1) == 2
    assert ledger.sums()["dropped"] == {LOST_IN_CRASH: 1, "scorer_error": 1}
    assert (ledger.sums()["trained"], ledger.sums()["in_flight"]) == (2, 0)


def test_what_was_trained_into_lost_weights_is_orphaned():
    ledger = Ledger(":memory:")
    run_session(ledger, one_step)
    ledger.recover(0)
    assert ledger.sums()["trained"] == 0
    assert ledger.sums()["dropped"] == {LOST_IN_CRASH: 1, ORPHANED: 2, "scorer_error": 1}
    assert ledger.next_version() == 2, "number 1 is spent"
    assert ledger.lineage(1) == {0, 1}


def test_what_was_trained_into_a_version_whose_row_is_lost_is_orphaned():
    ledger = Ledger(":memory:")
    run_session(ledger, one_step)
    ledger.apply([("DELETE FROM versions WHERE number = ?", (1,))])
    ledger.recover(0, "", Lost(versions=2, sequences=2, sessions=2, group_size=3))
    assert ledger.sums()["trained"] == 0
    assert ledger.sums()["dropped"] == {LOST_IN_CRASH: 1, ORPHANED: 2, "scorer_error": 1}
    assert ledger.query("SELECT number, orphaned FROM versions") == [(0, 0), (1, 1)]


def test_an_episode_is_trained_once():
    async def twice(journal):
        journal.admit("g0", 0, "t", 0, ["a"])
        batch = trained_batch(["a"], version=0)
        journal.train(batch, WeightVersion(number=1, parent=0, step=1))
        with pytest.raises(LawBroken, match="leaves once"):
            journal.train(batch, WeightVersion(number=2, parent=1, step=2))

    run_session(Ledger(":memory:"), twice)


def test_the_file_refuses_what_the_journal_should_have_refused():
    ledger = Ledger(":memory:")
    run_session(ledger, one_step)
    with pytest.raises(LawBroken):
        ledger.apply(
            [("UPDATE episodes SET state = 'dropped', reason = ? WHERE id = ? AND state = 'in_flight'", ("x", "a"))]
        )
    assert ledger.sums()["trained"] == 2


def test_a_version_number_is_given_out_once():
    async def again(journal):
        journal.version(WeightVersion(number=0, parent=None, step=0))
        await journal.flush()
        journal.version(WeightVersion(number=0, parent=None, step=0))
        with pytest.raises(sqlite3.IntegrityError):
            await journal.flush()

    run_session(Ledger(":memory:"), again)


def test_a_cancelled_flush_still_becomes_durable_and_in_order():
    """Found by simulation: a flush cancelled in mid-commit used to lose what it carried."""
    ledger = Ledger(":memory:")

    class SlowStore(DirectStore):
        async def apply(self, changes):
            await asyncio.sleep(0.02)
            await super().apply(changes)

    async def main():
        journal = Journal(SlowStore(ledger), session=ledger.recover(None))
        journal.admit("g0", 0, "t", 0, ["a"])
        flush = asyncio.create_task(journal.flush())
        await asyncio.sleep(0.005)
        flush.cancel()
        journal.drop("a", "late")
        await journal.flush()

    asyncio.run(main())
    assert ledger.sums()["dropped"] == {"late": 1}


def test_tokens_of_an_episode_that_has_left_are_not_counted():
    async def late(journal):
        journal.admit("g0", 0, "t", 0, ["a"])
        journal.drop("a", "late")
        journal.receive("a", 5)
        journal.check()
        assert journal.tokens_received == 0

    run_session(Ledger(":memory:"), late)


def test_an_audit_of_no_ledger_names_the_file(tmp_path):
    with pytest.raises(RunFolderError, match=r"nothing\.sqlite"):
        Ledger(tmp_path / "nothing.sqlite", read_only=True)


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"x" * 4096)
    with pytest.raises(RunFolderError, match="SQLite"):
        Ledger(tmp_path / "ledger.sqlite")


def test_a_commit_that_does_not_end_is_named_and_not_waited_for():
    class Hung:
        async def apply(self, changes):
            await asyncio.Event().wait()

    async def main():
        journal = Journal(Hung(), session=1, deadline_s=0.05)
        journal.version(WeightVersion(number=0, parent=None, step=0))
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for the ledger's commit"):
            await journal.flush()

    asyncio.run(main())


def test_a_batch_used_several_times_is_counted_so_and_names_its_teacher():
    ledger = Ledger(":memory:")

    async def work(journal: Journal) -> None:
        journal.version(WeightVersion(number=0, parent=None, step=0))
        journal.admit("g0", 0, "t", 0, ["a", "b"])
        journal.receive("a", 3)
        journal.receive("b", 3)
        made = WeightVersion(number=1, parent=0, step=1)
        journal.train(trained_batch(["a", "b"], version=0), made, times=3, teacher=0)
        journal.check()
        await journal.flush()

    run_session(ledger, work)
    assert ledger.query("SELECT times_trained, teacher FROM episodes") == [(3, 0), (3, 0)]
    assert ledger.sums()["trained"] == 2


def test_a_ledger_of_another_format_is_refused(tmp_path):
    file = tmp_path / "ledger.sqlite"
    Ledger(file).close()
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA user_version = 1")
    for read_only in (False, True):
        with pytest.raises(RunFolderError, match=r"reads ledgers of format 2, and this one is of format 1"):
            Ledger(file, read_only=read_only)


def test_a_ledger_whose_wal_is_gone_is_not_taken_for_an_empty_one(tmp_path):
    file = tmp_path / "ledger.sqlite"
    writer = Ledger(file)
    run_session(writer, one_step)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(file.read_bytes())
    with pytest.raises(RunFolderError, match=r"this one is empty.*-wal"):
        Ledger(copy, read_only=True)
    assert Ledger(file, read_only=True).sums() == writer.sums(), "with it all is there"


def test_a_damaged_page_is_told_with_the_path(tmp_path):
    file = tmp_path / "ledger.sqlite"
    run_session(ledger := Ledger(file), one_step)
    ledger.close()
    data = bytearray(file.read_bytes())
    for place in range(4096, len(data), 4096):
        data[place : place + 64] = bytes(64)
    file.write_bytes(data)
    with pytest.raises(RunFolderError, match=r"ledger is a sound SQLite file.*ledger\.sqlite"):
        Ledger(file, read_only=True).check_sound()


def test_a_reader_sees_the_ledger_as_it_was_when_it_was_opened(tmp_path):
    run_session(writer := Ledger(tmp_path / "ledger.sqlite"), one_step)
    reader = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    before = reader.sums()
    writer.recover(0)
    assert (reader.sums(), reader.sums() == writer.sums()) == (before, False)


def test_a_checkpoint_that_a_session_begins_from_is_on_record():
    run_session(ledger := Ledger(":memory:"), one_step)
    ledger.restored_from(1, "abc")
    ledger.restored_from(1, "another")
    assert ledger.query("SELECT version, step, session, digest FROM checkpoints") == [(1, 1, 1, "abc")]


def test_numbers_that_were_lost_are_booked_and_not_given_out_again():
    run_session(ledger := Ledger(":memory:"), one_step)
    session = ledger.recover(1, "", Lost(versions=5, sequences=4, sessions=3, group_size=2))
    assert (session, ledger.next_version(), ledger.next_sequence()) == (3, 5, 4)
    assert ledger.sums()["dropped"][LOST_WITH_LEDGER] == 4
    assert ledger.query("SELECT number, orphaned FROM versions") == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]


def test_rows_that_nobody_reads_to_their_end_outlive_the_file():
    ledger = Ledger(":memory:")
    ledger.recover(None)
    ledger.recover(None)
    rows = ledger.rows("SELECT number FROM sessions ORDER BY number")
    assert next(rows) == (1,)
    ledger.close()
    rows.close()
