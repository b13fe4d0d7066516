"""Forgeries of ledger.sqlite alone, or with the summary that follows from it."""

from __future__ import annotations

from pathlib import Path

from forging import Tampering, execute, find, load, on_json, rebook, settle_summary, sql, together


def _first(run: Path) -> str:
    file, place = find(run)
    return load(file)[place]["id"]


def _row(**columns: object):
    """Change columns of the row of a stored episode."""
    return lambda run: rebook(run, _first(run), **columns)


def _raise(column: str, by: int = 1):
    return lambda run: execute(run, f"UPDATE episodes SET {column} = {column} + {by} WHERE id = ?", _first(run))


def _group_row(run: Path) -> None:
    rebook(run, _first(run), group_id="g0000001")


def _drop_with_reason(run: Path) -> None:
    rebook(run, _first(run), state="dropped", reason="unreadable")


DROPPED = "(SELECT MIN(id) FROM episodes WHERE reason = 'unreadable')"
ORPHAN = "(SELECT MIN(id) FROM episodes WHERE reason = 'orphaned_by_restore')"
LAST_ORPHAN = "(SELECT MAX(number) FROM versions WHERE orphaned = 1)"
LOST = "(SELECT MIN(id) FROM episodes WHERE reason = 'lost_in_crash')"

KNOWN = [
    Tampering("a trained episode booked as dropped", _drop_with_reason, False),
    Tampering("a row's produced version changed", _raise("produced", -1), False),
    Tampering("a row's task changed", _row(task="t99"), False),
    Tampering("a row's group changed", _group_row, False),
    Tampering("a row's admitted version lowered", _raise("admitted_version", -1), False),
    Tampering("a version's step changed", sql("UPDATE versions SET step = step + 1 WHERE number = 12"), False),
    Tampering(
        "a user's reason turned into the system's",
        sql(f"UPDATE episodes SET reason = 'lost_in_crash' WHERE id = {DROPPED}"),
        False,
    ),
    Tampering("a row removed", sql("DELETE FROM episodes WHERE id = 'g0000009/2'"), False),
    Tampering(
        "a row left in flight", sql("UPDATE episodes SET state = 'in_flight' WHERE id = 'g0000009/1'"), False
    ),
    Tampering("a row trained twice", _row(times_trained=2), False),
    Tampering("a row dropped without a reason", _row(state="dropped"), False),
    Tampering("a row trained beyond the bound", _raise("trained_at", 4), False),
]


# ── Episodes ─────────────────────────────────────────────────────────────────────────────────────────────


def _add_dropped_group(run: Path) -> None:
    """A group that nobody sampled, dropped, at the end of the order of admission."""
    sequence = execute(run, "SELECT MAX(sequence) + 1 FROM episodes")[0][0]
    for place in range(4):
        name = f"g{sequence:07d}"
        execute(
            run,
            "INSERT INTO episodes (id, group_id, sequence, place, task, state, reason, tokens, admitted_version,"
            " session) VALUES (?, ?, ?, ?, 't1', 'dropped', 'shutdown', 24, 18, 2)",
            f"{name}/{place}", name, sequence, place,
        )  # fmt: skip
    settle_summary(run)


def _add_trained_group(run: Path) -> None:
    """A group that nobody sampled, trained, into the last version."""
    sequence = execute(run, "SELECT MAX(sequence) + 1 FROM episodes")[0][0]
    for place in range(4):
        name = f"g{sequence:07d}"
        execute(
            run,
            "INSERT INTO episodes SELECT ?, ?, ?, ?, task, state, reason, tokens, wasted, admitted_version,"
            " version_min, version_max, trained_at, produced, times_trained, session, teacher FROM episodes"
            " WHERE state = 'trained' AND produced = (SELECT MAX(number) FROM versions) LIMIT 1",
            f"{name}/{place}", name, sequence, place,
        )  # fmt: skip
    settle_summary(run)


def _erase_last_group(run: Path) -> None:
    """The newest group of the crashed session was never admitted, if one believes the ledger."""
    (sequence,) = execute(run, "SELECT MAX(sequence) FROM episodes WHERE session = 1")[0]
    execute(run, "DELETE FROM episodes WHERE sequence = ?", sequence)
    execute(run, "UPDATE episodes SET sequence = sequence - 1 WHERE sequence > ?", sequence)
    settle_summary(run)


def _exchange_groups(run: Path) -> None:
    """All rows of two groups of one step have each other's ids."""
    names = [
        row[0] for row in execute(run, "SELECT DISTINCT group_id FROM episodes WHERE produced = 12 ORDER BY 1")
    ]
    one, other = names[:2]
    for old, new in ((one, "temporary"), (other, one), ("temporary", other)):
        execute(run, "UPDATE episodes SET id = ? || substr(id, -2), group_id = ? WHERE group_id = ?", new, new, old)


def _lose_to_orphan(run: Path) -> None:
    """A failure of the user's scorer is blamed on the crash."""
    execute(run, f"UPDATE episodes SET reason = 'orphaned_by_restore' WHERE id = {DROPPED}")
    settle_summary(run)


def _move_tokens(run: Path) -> None:
    """Tokens of one dropped episode are booked for another: the sums are the same."""
    one, other = (row[0] for row in execute(run, "SELECT id FROM episodes WHERE reason = 'unreadable' LIMIT 2"))
    execute(run, "UPDATE episodes SET tokens = tokens + 5 WHERE id = ?", one)
    execute(run, "UPDATE episodes SET tokens = tokens - 5 WHERE id = ?", other)


def _waste(run: Path) -> None:
    """Tokens of a trained episode's first attempt, which was not."""
    rebook(run, _first(run), wasted=40)
    settle_summary(run)


EPISODES = [
    Tampering("a row's tokens raised", _raise("tokens", 3), True),
    Tampering("tokens moved from one dropped episode to another", _move_tokens, True),
    Tampering("wasted tokens invented, in the summary too", _waste, True),
    Tampering(
        "two places of a group exchanged",
        sql("UPDATE episodes SET place = 1 - place WHERE group_id = 'g0000009' AND place < 2"),
        True,
    ),
    Tampering("a row's session changed", _row(session=1), True),
    Tampering(
        "a row's lowest version raised",
        sql(
            "UPDATE episodes SET version_min = version_max WHERE id ="
            " (SELECT MAX(id) FROM episodes WHERE state = 'trained' AND version_min < version_max)"
        ),
        True,
    ),
    Tampering("a row's versions forgotten", _row(version_min=None, version_max=None), True),
    Tampering("a row's teacher invented", _row(teacher=2), True),
    Tampering(
        "a dropped episode has versions and a product",
        sql(
            "UPDATE episodes SET version_min = 3, version_max = 3, trained_at = 3, produced = 4, times_trained = 1"
            f" WHERE id = {DROPPED}"
        ),
        True,
    ),
    Tampering("a trained episode has a reason", _row(reason="unreadable"), True),
    Tampering(
        "an orphan booked as trained",
        sql(
            "UPDATE episodes SET state = 'trained', reason = NULL, produced = 10, trained_at = 9"
            f" WHERE id = {ORPHAN}"
        ),
        True,
    ),
    Tampering(
        "an orphan's product forgotten",
        sql(f"UPDATE episodes SET produced = NULL, trained_at = NULL, times_trained = 0 WHERE id = {ORPHAN}"),
        True,
    ),
    Tampering(
        "an orphan called lost in the crash, in the summary too",
        together(sql(f"UPDATE episodes SET reason = 'lost_in_crash' WHERE id = {ORPHAN}"), settle_summary),
        True,
    ),
    Tampering("a scorer's failure called orphaned, in the summary too", _lose_to_orphan, True),
    Tampering(
        "an episode lost in the crash called the scorer's failure",
        together(sql(f"UPDATE episodes SET reason = 'unreadable' WHERE id = {LOST}"), settle_summary),
        True,
    ),
    Tampering("a state that does not exist", _row(state="pending"), True),
    Tampering("a dropped group invented, in the summary too", _add_dropped_group, True),
    Tampering("a trained group invented, in the summary too", _add_trained_group, True),
    Tampering("the newest group of the crashed session erased, later ones renumbered", _erase_last_group, True),
    Tampering("the rows of two groups exchanged", _exchange_groups, True),
    Tampering(
        "sequences of two groups exchanged",
        sql("UPDATE episodes SET sequence = CASE sequence WHEN 60 THEN 61 ELSE 60 END WHERE sequence IN (60, 61)"),
        True,
    ),
]


# ── Versions and sessions ────────────────────────────────────────────────────────────────────────────────


def _erase_crash(run: Path) -> None:
    """One session, no orphans: what the crash cost is not there."""
    execute(run, "DELETE FROM episodes WHERE reason IN ('orphaned_by_restore', 'lost_in_crash')")
    execute(run, "DELETE FROM versions WHERE orphaned = 1")
    execute(run, "DELETE FROM sessions WHERE number = 2")
    execute(run, "UPDATE sessions SET finished = 1")
    execute(run, "UPDATE episodes SET session = 1")
    execute(run, "UPDATE versions SET session = 1")
    numbers = [row[0] for row in execute(run, "SELECT DISTINCT sequence FROM episodes ORDER BY 1")]
    for new, old in enumerate(numbers):
        execute(run, "UPDATE episodes SET sequence = ? WHERE sequence = ?", new, old)
    settle_summary(run)


VERSIONS = [
    Tampering(
        "a version's parent is its grandparent",
        sql("UPDATE versions SET parent = parent - 1 WHERE number = 14"),
        True,
    ),
    Tampering(
        "the restored version's parent is an orphan",
        sql(
            f"UPDATE versions SET parent = {LAST_ORPHAN} WHERE number ="
            " (SELECT MIN(number) FROM versions WHERE session = 2)",
            f"UPDATE sessions SET restored = {LAST_ORPHAN} WHERE number = 2",
        ),
        True,
    ),
    Tampering(
        "an orphaned version called surviving",
        sql(
            "UPDATE versions SET orphaned = 0 WHERE number = (SELECT MAX(number) FROM versions WHERE orphaned = 1)"
        ),
        True,
    ),
    Tampering(
        "a surviving version called orphaned", sql("UPDATE versions SET orphaned = 1 WHERE number = 12"), True
    ),
    Tampering("the first version has a parent", sql("UPDATE versions SET parent = -1 WHERE number = 0"), True),
    Tampering("two versions have no parent", sql("UPDATE versions SET parent = NULL WHERE number = 12"), True),
    Tampering("a version's session changed", sql("UPDATE versions SET session = 1 WHERE number = 12"), True),
    Tampering(
        "all steps of the second session raised by one",
        sql("UPDATE versions SET step = step + 1 WHERE session = 2"),
        True,
    ),
    Tampering(
        "a version invented at the end",
        sql("INSERT INTO versions SELECT MAX(number) + 1, MAX(number), MAX(step) + 1, 2, 0 FROM versions"),
        True,
    ),
    Tampering("an orphaned version invented", sql("UPDATE versions SET parent = 5 WHERE number = 7"), True),
    Tampering(
        "an orphaned version removed",
        sql("DELETE FROM versions WHERE number = (SELECT MAX(number) FROM versions WHERE orphaned = 1)"),
        True,
    ),
    Tampering(
        "a session's start moved by a day",
        sql("UPDATE sessions SET started = started - 86400 WHERE number = 2"),
        True,
    ),
    Tampering(
        "a session restored from another version",
        sql("UPDATE sessions SET restored = restored - 1 WHERE number = 2"),
        True,
    ),
    Tampering("a crashed session called finished", sql("UPDATE sessions SET finished = 1 WHERE number = 1"), True),
    Tampering(
        "a finished session called unfinished", sql("UPDATE sessions SET finished = 0 WHERE number = 2"), True
    ),
    Tampering(
        "a session invented between two",
        sql(
            "UPDATE sessions SET number = 3 WHERE number = 2",
            "UPDATE episodes SET session = 3 WHERE session = 2",
            "UPDATE versions SET session = 3 WHERE session = 2",
            "INSERT INTO sessions SELECT 2, started - 1, restored, config, 1 FROM sessions WHERE number = 3",
        ),
        True,
    ),
    Tampering("the crash erased from the ledger and the summary", _erase_crash, True),
    Tampering(
        "all rows of the ledger removed",
        sql("DELETE FROM episodes", "DELETE FROM versions", "DELETE FROM sessions"),
        True,
    ),
]

SUMMARY = [
    Tampering(
        "the summary's trained episodes raised",
        on_json("summary.json", lambda s: s["ledger"].update(trained=s["ledger"]["trained"] + 4)),
        True,
    ),
    Tampering(
        "the summary's largest staleness lowered",
        on_json("summary.json", lambda s: s.update(staleness_max=0)),
        True,
    ),
    Tampering("the summary's steps raised", on_json("summary.json", lambda s: s.update(steps=50)), True),
    Tampering(
        "the summary's evaluation invented",
        on_json(
            "summary.json",
            lambda s: s.update(eval_after=0.99, evaluations=[{"step": 14, "version": 18, "pass_1": 0.99}]),
        ),
        True,
    ),
    Tampering(
        "the summary's last evaluation embellished",
        on_json("summary.json", lambda s: s.update(eval_after=0.99)),
        True,
    ),
    Tampering(
        "the summary's users' metrics invented",
        on_json("summary.json", lambda s: s.update(user={"right": 1.0})),
        True,
    ),
    Tampering(
        "the summary's drops forgotten", on_json("summary.json", lambda s: s["ledger"].update(dropped={})), True
    ),
    Tampering("the summary says unfinished", on_json("summary.json", lambda s: s.update(finished=False)), True),
    Tampering(
        "the summary's mean lengths changed",
        on_json("summary.json", lambda s: s["mean_tokens"].update(trained=99.0)),
        True,
    ),
    Tampering("the summary's first step changed", on_json("summary.json", lambda s: s.update(first_step=0)), True),
    Tampering(
        "the summary's seconds changed",
        on_json("summary.json", lambda s: s.update(seconds=s["seconds"] * 3600)),
        True,
    ),
    Tampering("the summary removed", lambda run: (run / "summary.json").unlink(), True),
]

ALL = [*KNOWN, *EPISODES, *VERSIONS, *SUMMARY]
