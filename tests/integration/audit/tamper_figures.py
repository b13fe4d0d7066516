"""Forgeries of staleness and rewards in all files that tell of them, and of what was recorded at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from forging import (
    Line,
    Tampering,
    execute,
    find,
    load,
    on_config,
    on_lines,
    rebook,
    save,
    settle,
    settle_advantages,
    settle_all_advantages,
    settle_metrics,
    step_files,
    versions_of,
)


def _file(run: Path, step: int) -> Path:
    return run / "episodes" / f"step-{step:06d}.jsonl"


# ── Staleness ───────────────────────────────────────────────────────────────────────────────────────────


def _freshen(line: Line, limit: int) -> bool:
    """Raise versions below the limit in tokens and lineage. Swaps that no longer change anything go."""
    changed = False
    for turn in line["turns"]:
        changed |= min(turn["versions"]) < limit
        turn["versions"] = [max(version, limit) for version in turn["versions"]]
        lineage: list[Line] = []
        for event in turn["lineage"]:
            event["version"] = max(event["version"], limit)
            if not lineage or event["version"] != lineage[-1]["version"]:
                lineage.append(event)
        turn["lineage"] = lineage
    return changed


def _hide_staleness(run: Path) -> None:
    """The configuration has a bound of 1, and no token is older: versions are raised in tokens, lineage, admission,
    ledger, metrics and summary."""
    on_config("max_staleness = 2", "max_staleness = 1")(run)
    found = False
    for file in step_files(run):
        lines = load(file)
        for line in lines:
            limit = line["trained_version"] - 1
            found |= _freshen(line, limit)
            line["admitted_version"] = max(line["admitted_version"], limit)
            rebook(run, line["id"], admitted_version=line["admitted_version"], **versions_of(line))
        save(file, lines)
    assert found
    settle(run)


def _stale_within_looser_bound(run: Path) -> None:
    """A token beyond the bound, and a configuration that allows it."""
    on_config("max_staleness = 2", "max_staleness = 3")(run)
    file, place = find(run)
    lines = load(file)
    line = lines[place]
    line["admitted_version"] = line["trained_version"] - 3
    for turn in line["turns"][:1]:
        turn["versions"] = [line["admitted_version"]] * len(turn["tokens"])
        turn["lineage"] = [{**turn["lineage"][0], "version": line["admitted_version"]}]
    save(file, lines)
    rebook(run, line["id"], admitted_version=line["admitted_version"], **versions_of(line))
    settle(run)


# ── Rewards ─────────────────────────────────────────────────────────────────────────────────────────────


def _raise_all_rewards(run: Path) -> None:
    """All rewards by the same amount: advantages are the same, the metrics are better."""
    on_lines(lambda line: line.update(reward=line["reward"] + 0.5))(run)
    settle(run)


def _double_rewards_and_advantages(run: Path) -> None:
    """All rewards twice as large: advantages differ only by what keeps a division from failing, and follow."""
    on_lines(lambda line: line.update(reward=line["reward"] * 2))(run)
    settle_all_advantages(run)
    settle(run)


def _better_run(run: Path) -> None:
    """Rewards rise with the steps; advantages and metrics follow."""
    for file in step_files(run):
        lines = load(file)
        for line in lines:
            line["reward"] = line["reward"] + line["step"] / 10 * (int(line["id"][-1]) % 2)
        save(file, lines)
        settle_advantages(run, lines[0]["step"])
    settle(run)


def _invert(run: Path) -> None:
    """All rewards and advantages have the other sign: the run was trained on the opposite."""
    for file in step_files(run):
        lines = load(file)
        for line in lines:
            line["reward"] = -line["reward"]
            line["advantage"] = -line["advantage"]
        save(file, lines)
    settle_metrics(run)


def _other_algorithm(run: Path) -> None:
    """Advantages that are not divided by the deviation, and a configuration that says so."""
    on_config("normalise_std = true", "normalise_std = false")(run)
    settle_all_advantages(run)
    settle(run)


# ── What was set aside, and what was not recorded ───────────────────────────────────────────────────────


def _aside(run: Path) -> Path:
    return sorted((run / "episodes" / "orphaned-1").glob("step-*.jsonl"))[0]


def _change_aside(run: Path) -> None:
    lines = load(_aside(run))
    for line in lines:
        line["reward"] += 3.0
        line["turns"][0]["logprobs"] = []
    save(_aside(run), lines)


def _aside_into_files(run: Path) -> None:
    """A line that was set aside stands in the step's file beside those that came after."""
    lines = load(_aside(run))
    target = _file(run, lines[0]["step"])
    save(target, [*load(target), lines[0]])


def _half_recorded(run: Path) -> None:
    """Every other group is not stored, as a fraction of 0.5 would have it, and not by the rule of the fraction."""
    on_config("episodes = 1.0", "episodes = 0.5")(run)
    for file in step_files(run):
        lines = load(file)
        save(file, [line for line in lines if line["sequence"] % 2])
    events = load(run / "events.jsonl")
    half = {"fraction_of_groups": 0.5}
    save(run / "events.jsonl", [{**e, **half} if e["kind"] == "recording" else e for e in events])


def _none_recorded(run: Path) -> None:
    on_config("episodes = 1.0", "episodes = 0.0")(run)
    shutil.rmtree(run / "episodes")


def _none_recorded_events_too(run: Path) -> None:
    _none_recorded(run)
    events = load(run / "events.jsonl")
    for event in events:
        if event["kind"] == "recording":
            event["fraction_of_groups"] = 0.0
        if event["kind"] == "recorded":
            event.update(groups_written=0, episodes_written=0)
    save(run / "events.jsonl", events)


# ── Time ─────────────────────────────────────────────────────────────────────────────────────────────────

LATER_S = 86_400.0


def _a_day_later(run: Path) -> None:
    """The run was made a day later, in all files."""

    def change(line: Line) -> None:
        line["started"] += LATER_S
        line["finished"] += LATER_S

    on_lines(change)(run)
    execute(run, "UPDATE sessions SET started = started + ?", LATER_S)
    save(run / "events.jsonl", [{**e, "time": e["time"] + LATER_S} for e in load(run / "events.jsonl")])


def _faster_publications(run: Path) -> None:
    """Transfers took a tenth of their time, in events and metrics."""
    events = load(run / "events.jsonl")
    for event in events:
        if event["kind"] == "published":
            stages = {name: spent / 10 for name, spent in event["stages"].items()}
            event.update(seconds=event["seconds"] / 10, pause_s=event["pause_s"] / 10, stages=stages)
    save(run / "events.jsonl", events)
    metrics = load(run / "metrics.jsonl")
    short = [{**m, "sync_s": m["sync_s"] / 10, "swap_pause_s": m["swap_pause_s"] / 10} for m in metrics]
    save(run / "metrics.jsonl", short)


ALL = [
    Tampering("staleness hidden: versions raised in all files, a bound of 1", _hide_staleness, True),
    Tampering("a token beyond the bound, and a looser bound", _stale_within_looser_bound, True),
    Tampering("all rewards raised, metrics computed again", _raise_all_rewards, True),
    Tampering("rewards that rise with the steps, advantages and metrics computed again", _better_run, True),
    Tampering("all rewards and advantages negated", _invert, True),
    Tampering("advantages of another algorithm, and a configuration that says so", _other_algorithm, True),
    Tampering("episodes that were set aside are changed", _change_aside, True),
    Tampering(
        "episodes that were set aside are removed", lambda run: shutil.rmtree(run / "episodes" / "orphaned-1"), True
    ),
    Tampering("an episode that was set aside stands in its step's file", _aside_into_files, True),
    Tampering("every other group not stored, and a fraction that would explain it", _half_recorded, True),
    Tampering("no episode stored, and a fraction that says so", _none_recorded, True),
    Tampering("all rewards doubled, advantages and metrics computed again", _double_rewards_and_advantages, True),
    Tampering("no episode stored, and a fraction and events that say so", _none_recorded_events_too, True),
    Tampering("a day later in all files", _a_day_later, True),
    Tampering("publications ten times as fast in events and metrics", _faster_publications, True),
]
