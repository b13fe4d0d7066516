"""Forgeries of steps, groups and episodes in all files that tell of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from forging import (
    FIRST_STEP,
    Line,
    Tampering,
    execute,
    find,
    groups_of,
    load,
    on_config,
    on_lines,
    rebook,
    save,
    settle,
    settle_advantages,
    settle_metrics,
    settle_summary,
    sql,
    tokens_of,
    versions_of,
)

SEED = 1_000_003


def _file(run: Path, step: int) -> Path:
    return run / "episodes" / f"step-{step:06d}.jsonl"


def _seeds(line: Line, sequence: int, place: int) -> None:
    """Seeds as a run with seed 0 gives them to an episode in this place."""
    episode = (sequence * SEED + place) & 0x7FFF_FFFF_FFFF
    for index, turn in enumerate(line["turns"]):
        turn["seed"] = (episode * SEED + index) & 0x7FFF_FFFF_FFFF_FFFF


def _consumed_by(line: Line, other: Line) -> None:
    for column in ("step", "trained_version", "produced_version"):
        line[column] = other[column]


def _rebook_step(run: Path, line: Line) -> None:
    rebook(run, line["id"], trained_at=line["trained_version"], produced=line["produced_version"])


# ── Between steps ───────────────────────────────────────────────────────────────────────────────────────


def _move_episode(run: Path) -> None:
    """One episode was trained in the next step, if one believes file, ledger and metrics."""
    source, target = _file(run, FIRST_STEP), _file(run, FIRST_STEP + 1)
    lines, others = load(source), load(target)
    moved = next(line for line in lines if versions_of(line)["version_min"] >= others[0]["trained_version"] - 2)
    lines.remove(moved)
    _consumed_by(moved, others[0])
    save(source, lines)
    save(target, [*others, moved])
    _rebook_step(run, moved)
    settle(run)


def _exchange_groups_between_steps(run: Path) -> None:
    """Two groups of two steps, which are as stale as they may be afterwards, in file, ledger and metrics."""
    files = _file(run, FIRST_STEP), _file(run, FIRST_STEP + 1)
    lines, others = map(load, files)
    one = next(
        group
        for group in groups_of(lines).values()
        if min(versions_of(line)["version_min"] for line in group) >= others[0]["trained_version"] - 2
    )
    other = next(
        group
        for group in groups_of(others).values()
        if max(versions_of(line)["version_max"] for line in group) <= lines[0]["trained_version"]
    )
    here, there = dict(lines[0]), dict(others[0])
    lines = [line for line in lines if line["group"] != one[0]["group"]] + other
    others = [line for line in others if line["group"] != other[0]["group"]] + one
    for group, to in ((one, there), (other, here)):
        for line in group:
            _consumed_by(line, to)
            _rebook_step(run, line)
    save(files[0], lines)
    save(files[1], others)
    settle(run)


def _rename_files(run: Path) -> None:
    one, other = _file(run, FIRST_STEP), _file(run, FIRST_STEP + 1)
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _rename_with_steps(run: Path) -> None:
    _rename_files(run)
    for step in (FIRST_STEP, FIRST_STEP + 1):
        lines = load(_file(run, step))
        save(_file(run, step), [{**line, "step": step} for line in lines])


def _forget_last_step(run: Path) -> None:
    """The run ended one step earlier: nothing tells of the last one."""
    (last,) = execute(run, "SELECT MAX(number) FROM versions")[0]
    execute(
        run,
        "UPDATE episodes SET state = 'dropped', reason = 'run_finished', version_min = NULL, version_max = NULL,"
        " trained_at = NULL, produced = NULL, times_trained = 0 WHERE produced = ?",
        last,
    )
    execute(run, "DELETE FROM versions WHERE number = ?", last)
    _file(run, 14).unlink()
    save(run / "metrics.jsonl", load(run / "metrics.jsonl")[:-1])
    save(run / "events.jsonl", [e for e in load(run / "events.jsonl") if e.get("step") != 14])
    (run / "versions" / f"{last:07d}.safetensors").unlink(missing_ok=True)
    shutil.rmtree(run / "checkpoints" / "step-000014")
    on_config("steps = 14", "steps = 13")(run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "steps": 13}))
    settle(run)


def _forget_last_step_and_model(run: Path) -> None:
    """Likewise, and the final model is the version before."""
    _forget_last_step(run)
    (last,) = execute(run, "SELECT MAX(number) FROM versions")[0]
    (final,) = (run / "checkpoints" / "final").glob("*.safetensors")
    shutil.copy(run / "versions" / f"{last:07d}.safetensors", final)


# ── Groups and episodes ─────────────────────────────────────────────────────────────────────────────────


def _replace_group(run: Path) -> None:
    """A group is another one of its step, under its own ids and seeds, in the ledger and the metrics too."""
    file = _file(run, FIRST_STEP)
    lines = load(file)
    groups = [group for group in groups_of(lines).values() if len(group) == 4]
    victim, source = groups[:2]
    for place, (mine, its) in enumerate(zip(victim, source, strict=True)):
        own = {column: mine[column] for column in ("id", "group", "sequence")}
        mine.clear()
        mine.update(json.loads(json.dumps(its)) | own)
        _seeds(mine, own["sequence"], place)
        columns = tokens_of(mine) | versions_of(mine)
        rebook(run, mine["id"], task=mine["task"]["id"], admitted_version=mine["admitted_version"], **columns)
    save(file, lines)
    settle(run)


def _replace_episode(run: Path) -> None:
    """The worst episode of a group is a copy of its best under its own id and seeds; all figures follow."""
    file, _ = find(run, lambda line: True)
    lines = load(file)
    group = max(
        groups_of(lines).values(),
        key=lambda group: max(e["reward"] for e in group) - min(e["reward"] for e in group),
    )
    worst, best = min(group, key=lambda line: line["reward"]), max(group, key=lambda line: line["reward"])
    name, sequence = worst["id"], worst["sequence"]
    worst.clear()
    worst.update(json.loads(json.dumps(best)) | {"id": name})
    _seeds(worst, sequence, int(name[-1]))
    save(file, lines)
    rebook(run, name, **tokens_of(worst), **versions_of(worst))
    settle_advantages(run, worst["step"])
    settle(run)


def _drop_worst(run: Path) -> None:
    """The worst episode of a group was never trained on: dropped in the ledger and the events, its line removed,
    the group's advantages and all figures computed again."""
    file = _file(run, FIRST_STEP)
    lines = load(file)
    group = max(groups_of(lines).values(), key=len)
    worst = min(group, key=lambda line: line["reward"])
    save(file, [line for line in lines if line is not worst])
    rebook(
        run, worst["id"], state="dropped", reason="unreadable", version_min=None, version_max=None, trained_at=None,
        produced=None, times_trained=0,
    )  # fmt: skip
    events = load(run / "events.jsonl")
    like = next(e for e in events if e["kind"] == "dropped")
    at = max(place for place, e in enumerate(events) if e["time"] <= worst["finished"])
    events.insert(at + 1, {**like, "time": worst["finished"], "episode": worst["id"]})
    save(run / "events.jsonl", events)
    settle_advantages(run, worst["step"])
    settle(run)


def _train_failed(run: Path) -> None:
    """An episode that the scorer could not judge was trained on after all: a copy of a sibling, in all files."""
    failed = [row[0] for row in execute(run, "SELECT id FROM episodes WHERE reason = 'unreadable'")]
    groups = {name[:-2]: name for name in failed}
    file, place = find(run, lambda line: line["group"] in groups)
    lines = load(file)
    sibling, name = lines[place], groups[lines[place]["group"]]
    added = json.loads(json.dumps(sibling)) | {"id": name}
    _seeds(added, added["sequence"], int(name[-1]))
    members = [line for line in lines if line["group"] == sibling["group"]] + [added]
    rest = [line for line in lines if line["group"] != sibling["group"]]
    at = lines.index(next(line for line in lines if line["group"] == sibling["group"]))
    lines = rest[:at] + sorted(members, key=lambda line: line["id"]) + rest[at:]
    save(file, lines)
    rebook(
        run, name, state="trained", reason=None, trained_at=added["trained_version"],
        produced=added["produced_version"], times_trained=1, **tokens_of(added), **versions_of(added),
    )  # fmt: skip
    save(run / "events.jsonl", [e for e in load(run / "events.jsonl") if e.get("episode") != name])
    settle_advantages(run, added["step"])
    settle(run)


def _renumber(run: Path, first: int, by: int) -> None:
    """All groups from a sequence on are admitted so many places later, in ledger, files and events."""

    def name(sequence: int) -> str:
        return f"g{sequence:07d}"

    (last,) = execute(run, "SELECT MAX(sequence) FROM episodes")[0]
    for old in sorted(range(first, last + 1), reverse=by > 0):
        if execute(run, "SELECT COUNT(*) FROM episodes WHERE sequence = ?", old)[0][0]:
            execute(
                run,
                "UPDATE episodes SET id = ? || substr(id, -2), group_id = ?, sequence = ? WHERE sequence = ?",
                name(old + by), name(old + by), old + by, old,
            )  # fmt: skip

    def moved(text: str) -> str:
        sequence = int(text[1:8])
        return name(sequence + by) + text[8:] if sequence >= first else text

    def change(line: Line) -> None:
        line["id"], line["group"] = moved(line["id"]), moved(line["group"])
        line["sequence"] = int(line["group"][1:])
        _seeds(line, line["sequence"], int(line["id"][-1]))

    on_lines(change)(run)
    events = load(run / "events.jsonl")
    save(run / "events.jsonl", [{**e, "episode": moved(e["episode"])} if "episode" in e else e for e in events])


def _never_admitted(run: Path) -> None:
    """Groups that were lost in the crash were never admitted; all later ones are renumbered everywhere."""
    lost = "SELECT sequence FROM episodes GROUP BY sequence HAVING SUM(reason IS NOT 'lost_in_crash') = 0"
    for (sequence,) in sorted(execute(run, lost), reverse=True):
        execute(run, "DELETE FROM episodes WHERE sequence = ?", sequence)
        _renumber(run, sequence + 1, -1)
    settle(run)


def _invent_admission(run: Path) -> None:
    """A group was admitted and lost in the crash that never was; all later ones are renumbered everywhere."""
    (sequence,) = execute(run, "SELECT MAX(sequence) + 1 FROM episodes WHERE session = 1")[0]
    _renumber(run, sequence, 1)
    for place in range(4):
        execute(
            run,
            "INSERT INTO episodes (id, group_id, sequence, place, task, state, reason, admitted_version, session)"
            " SELECT ?, ?, ?, ?, 't1', 'dropped', 'lost_in_crash', MAX(admitted_version), 1 FROM episodes"
            " WHERE session = 1",
            f"g{sequence:07d}/{place}", f"g{sequence:07d}", sequence, place,
        )  # fmt: skip
    settle(run)


def _erase_failures(run: Path) -> None:
    """The scorer never failed: groups were smaller, if one believes ledger, events and summary."""
    execute(run, "DELETE FROM episodes WHERE reason = 'unreadable'")
    save(run / "events.jsonl", [e for e in load(run / "events.jsonl") if e["kind"] != "dropped"])
    settle(run)


def _rename_task(run: Path) -> None:
    """A group was another task's, in all files; the prompt and its tokens are the old ones."""
    file, place = find(run)
    lines = load(file)
    group = lines[place]["group"]
    for line in lines:
        if line["group"] == group:
            line["task"]["id"] = "t63"
    save(file, lines)
    execute(run, "UPDATE episodes SET task = 't63' WHERE group_id = ?", group)


def _answer_of_group(run: Path) -> None:
    """A whole group's task has another answer: siblings agree."""
    file, place = find(run)
    lines = load(file)
    for line in lines:
        if line["group"] == lines[place]["group"]:
            line["task"]["answer"] = "w99"
    save(file, lines)


def _start_earlier(run: Path) -> None:
    """A group was admitted one version earlier, in file and ledger: all of it, as admission is by group."""
    file, place = find(run, lambda line: line["admitted_version"] > line["trained_version"] - 2)
    lines = load(file)
    for line in lines:
        if line["group"] == lines[place]["group"]:
            line["admitted_version"] -= 1
    save(file, lines)
    execute(
        run, "UPDATE episodes SET admitted_version = admitted_version - 1 WHERE group_id = ?", lines[place]["group"]
    )


def _log_of_another_run(run: Path) -> None:
    """All episodes of a step are those of the step before, under this one's ids, in the ledger and metrics too."""
    source, target = load(_file(run, FIRST_STEP)), _file(run, FIRST_STEP + 1)
    lines = load(target)
    for mine, its in zip(lines, source, strict=False):
        kept = {
            c: mine[c] for c in ("id", "group", "sequence", "step", "trained_version", "produced_version", "task")
        }
        mine.clear()
        mine.update(json.loads(json.dumps(its)) | kept)
        _seeds(mine, mine["sequence"], int(mine["id"][-1]))
        rebook(run, mine["id"], admitted_version=mine["admitted_version"], **tokens_of(mine), **versions_of(mine))
    save(target, lines)
    settle_advantages(run, lines[0]["step"])
    settle(run)


def _erase_crash(run: Path) -> None:
    """No crash in any file: one session, no orphans, nothing set aside. Version numbers keep their gap."""
    execute(run, "DELETE FROM episodes WHERE reason IN ('orphaned_by_restore', 'lost_in_crash')")
    sql(
        "DELETE FROM versions WHERE orphaned = 1",
        "DELETE FROM sessions WHERE number = 2",
        "UPDATE sessions SET finished = 1",
        "UPDATE episodes SET session = 1",
        "UPDATE versions SET session = 1",
    )(run)
    events, began = load(run / "events.jsonl"), 0
    kept = []
    for event in events:
        began += event["kind"] == "started"
        if not (began == 2 and event["kind"] in ("started", "recording")):
            kept.append(event)
    save(run / "events.jsonl", kept)
    shutil.rmtree(run / "episodes" / "orphaned-1")
    (run / "metrics.orphaned.jsonl").unlink()
    gaps = {row[0] for row in execute(run, "SELECT DISTINCT sequence FROM episodes")}
    for sequence in sorted(set(range(max(gaps))) - gaps, reverse=True):
        _renumber(run, sequence + 1, -1)
    settle_metrics(run)
    settle_summary(run)


ALL = [
    Tampering("an episode moved to the next step, in file, ledger and metrics", _move_episode, True),
    Tampering(
        "two groups exchanged between steps, in file, ledger and metrics", _exchange_groups_between_steps, True
    ),
    Tampering("two steps' files renamed", _rename_files, True),
    Tampering("two steps' files renamed, and the steps in them", _rename_with_steps, True),
    Tampering("the last step forgotten in all files", _forget_last_step, True),
    Tampering("the last step forgotten in all files, the final model exchanged", _forget_last_step_and_model, True),
    Tampering("a group replaced by a copy of another, in all files", _replace_group, True),
    Tampering("the worst episode of a group replaced by its best, in all files", _replace_episode, True),
    Tampering("the worst episode of a group dropped, in all files", _drop_worst, True),
    Tampering("a failed episode trained on after all, in all files", _train_failed, True),
    Tampering("groups lost in the crash never admitted, later ones renumbered in all files", _never_admitted, True),
    Tampering("an admission invented, later ones renumbered in all files", _invent_admission, True),
    Tampering("the scorer's failures erased from all files", _erase_failures, True),
    Tampering("a group's task renamed in file and ledger", _rename_task, True),
    Tampering("a whole group's answer changed", _answer_of_group, True),
    Tampering("a group admitted one version earlier in file and ledger", _start_earlier, True),
    Tampering("a step's episodes are those of the step before, in all files", _log_of_another_run, True),
    Tampering("the crash erased from all files", _erase_crash, True),
]
