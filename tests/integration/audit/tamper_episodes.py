"""Forgeries of what is stored about an episode, with or without the ledger's row of it."""

from __future__ import annotations

from pathlib import Path

from forging import (
    FIRST_STEP,
    Line,
    Tampering,
    execute,
    find,
    groups_of,
    load,
    on_line,
    on_lines,
    on_step,
    on_turn,
    on_turns,
    rebook,
    save,
    set_support,
    settle,
    settle_advantages,
    step_files,
    tokens_of,
    versions_of,
)

# ── Known to have gone unnoticed ────────────────────────────────────────────────────────────────────────


def _copy_to_another_step(run: Path) -> None:
    source, target = step_files(run)[6:8]
    save(target, [*load(target), load(source)[0]])


def _unknown_product(line: Line) -> None:
    line["produced_version"] = 999


def _other_group(lines: list[Line]) -> None:
    lines[0]["group"] = lines[-1]["group"]


def _empty_support(turn: Line) -> None:
    turn["support"] = {"ids": [], "offsets": [0] * (len(turn["tokens"]) + 1)}


def _invented_support(turn: Line) -> None:
    set_support(turn, [sorted({token, (token + 1) % 18, (token + 5) % 18}) for token in turn["tokens"]])


def _reward(line: Line) -> None:
    line["reward"] += 1.0


def _advantage(line: Line) -> None:
    line["advantage"] = -line["advantage"] + 0.25


KNOWN = [
    Tampering("log-probs emptied in all episodes", on_turns(lambda turn: turn.update(logprobs=[])), False),
    Tampering("a stored line doubled", on_step(lambda lines: [lines[0], *lines]), False),
    Tampering("a stored line copied into another step", _copy_to_another_step, False),
    Tampering("a stored line removed", on_step(lambda lines: lines[1:]), False),
    Tampering("a step's file deleted", lambda run: step_files(run)[7].unlink(), False),
    Tampering("a stored episode's produced version unknown", on_line(_unknown_product), False),
    Tampering("a stored episode's task id changed", on_line(lambda line: line["task"].update(id="t99")), False),
    Tampering("a stored episode's step changed", on_line(lambda line: line.update(step=line["step"] + 1)), False),
    Tampering("a stored episode's group changed", on_step(_other_group), False),
    Tampering(
        "a stored episode's admitted version lowered",
        on_line(lambda line: line.update(admitted_version=line["admitted_version"] - 1)),
        False,
    ),
    Tampering("a reward changed", on_line(_reward), False),
    Tampering("an advantage changed", on_line(_advantage), False),
    Tampering("a text changed", on_line(lambda line: line.update(text="w1 w2 w3")), False),
    Tampering("an answer changed", on_line(lambda line: line["task"].update(answer="w99")), False),
    Tampering("support rows emptied", on_turn(_empty_support), False),
    Tampering("support rows invented", on_turn(_invented_support), False),
    Tampering(
        "a token's version raised by one",
        on_turn(lambda turn: turn["versions"].append(turn["versions"].pop() + 1)),
        False,
    ),
    Tampering(
        "a log-prob lowered by 0.01 in every turn",
        on_turns(lambda turn: turn["logprobs"].append(turn["logprobs"].pop() - 0.01)),
        False,
    ),
]


# ── What is said about an episode ───────────────────────────────────────────────────────────────────────


def _exchange_contents(lines: list[Line]) -> None:
    """Two siblings' ids; rewards and advantages go with the contents."""
    one, other = lines[0], lines[1]
    one["id"], other["id"] = other["id"], one["id"]


def _exchange_with_ledger(run: Path) -> None:
    """Two siblings change places, in the ledger and in their seeds too."""
    file, place = find(run, lambda line: line["id"].endswith("/0"))
    lines = load(file)
    one, other = lines[place], lines[place + 1]
    one["id"], other["id"] = other["id"], one["id"]
    for a, b in zip(one["turns"], other["turns"], strict=False):
        a["seed"], b["seed"] = b["seed"], a["seed"]
    lines[place], lines[place + 1] = other, one
    save(file, lines)
    for line in (one, other):
        rebook(run, line["id"], **tokens_of(line), **versions_of(line))


def _exchange_rewards(lines: list[Line]) -> None:
    one, other = next((a, b) for g in groups_of(lines).values() for a in g for b in g if a["reward"] < b["reward"])
    for column in ("reward", "advantage"):
        one[column], other[column] = other[column], one[column]


def _raise_a_groups_rewards(run: Path) -> None:
    """One episode's reward, the group's advantages and the step's metrics with it."""
    file, place = find(run, lambda line: True)
    lines = load(file)
    lines[place]["reward"] += 1.0
    save(file, lines)
    settle_advantages(run, lines[place]["step"])
    settle(run)


def _double_all_rewards(run: Path) -> None:
    """Advantages are normalised: they stay as they are."""
    for file in step_files(run):
        lines = load(file)
        for line in lines:
            line["reward"] *= 2
        save(file, lines)
    settle(run)


def _teacher_in_both(run: Path) -> None:
    file, place = find(run)
    lines = load(file)
    lines[place]["teacher"] = 3
    save(file, lines)
    rebook(run, lines[place]["id"], teacher=3)


def _admission_in_both(line: Line) -> dict[str, int]:
    line["admitted_version"] -= 1
    return {"admitted_version": line["admitted_version"]}


def _trained_version_in_both(run: Path) -> None:
    """A whole step consumed by the version before, so that its tokens look less stale."""
    for file in step_files(run)[FIRST_STEP - 1 : FIRST_STEP]:
        lines = load(file)
        fresh = [line for line in lines if versions_of(line)["version_max"] < line["trained_version"]]
        assert fresh
        for line in fresh:
            line["trained_version"] -= 1
            rebook(run, line["id"], trained_at=line["trained_version"])
        save(file, lines)


def _renumber_group(run: Path) -> None:
    """Two groups change their places in the order of admission, in the file and in the ledger."""
    file, _ = find(run)
    lines = load(file)
    one, other = list(groups_of(lines).values())[:2]
    a, b = one[0]["sequence"], other[0]["sequence"]
    for members, sequence in ((one, b), (other, a)):
        for line in members:
            line["sequence"] = sequence
    save(file, lines)
    execute(
        run,
        f"UPDATE episodes SET sequence = CASE sequence WHEN {a} THEN {b} ELSE {a} END WHERE sequence IN ({a}, {b})",
    )


def _of_another_group(lines: list[Line]) -> None:
    """The advantages of one group are another's."""
    groups = list(groups_of(lines).values())
    one, other = next((a, b) for a in groups for b in groups if a is not b and len(a) == len(b))
    for mine, its in zip(one, other, strict=True):
        mine["advantage"], its["advantage"] = its["advantage"], mine["advantage"]


def _earlier(line: Line) -> None:
    line["started"] -= 3600
    line["finished"] -= 3600


ABOUT = [
    Tampering("the ids of two siblings exchanged", on_step(_exchange_contents), True),
    Tampering("two siblings exchanged, in ledger and seeds too", _exchange_with_ledger, True),
    Tampering("rewards and advantages of two siblings exchanged", on_step(_exchange_rewards), True),
    Tampering("a reward raised, advantages and metrics computed again", _raise_a_groups_rewards, True),
    Tampering("all rewards doubled, metrics computed again", _double_all_rewards, True),
    Tampering("all advantages halved", on_lines(lambda line: line.update(advantage=line["advantage"] / 2)), True),
    Tampering("advantages of two groups exchanged", on_step(_of_another_group), True),
    Tampering("an episode without a reward", on_line(lambda line: line.update(reward=None)), True),
    Tampering("a reward is not a number", on_line(lambda line: line.update(reward="nan")), True),
    Tampering("a text removed", on_line(lambda line: line.update(text=None)), True),
    Tampering("data of a task changed", on_line(lambda line: line["task"]["data"].update(level=9)), True),
    Tampering(
        "a task's prompt changed, its tokens not", on_line(lambda line: line["task"].update(prompt="w1 w1")), True
    ),
    Tampering("metrics of an episode changed", on_line(lambda line: line["metrics"].update(length=999.0)), True),
    Tampering("metrics of an episode removed", on_line(lambda line: line.update(metrics={})), True),
    Tampering(
        "an episode that finished before it began",
        on_line(lambda line: line.update(finished=line["started"] - 5)),
        True,
    ),
    Tampering("an episode from before the run", on_line(_earlier), True),
    Tampering("a teacher invented", on_line(lambda line: line.update(teacher=3)), True),
    Tampering("a teacher invented, in the ledger too", _teacher_in_both, True),
    Tampering(
        "an episode's sequence changed", on_line(lambda line: line.update(sequence=line["sequence"] + 1)), True
    ),
    Tampering("two groups exchanged in the order of admission, in the ledger too", _renumber_group, True),
    Tampering(
        "the trained version lowered",
        on_line(lambda line: line.update(trained_version=line["trained_version"] - 1)),
        True,
    ),
    Tampering("the trained version of stale episodes lowered, in the ledger too", _trained_version_in_both, True),
    Tampering(
        "the produced version raised",
        on_line(lambda line: line.update(produced_version=line["produced_version"] + 1)),
        True,
    ),
    Tampering("the admitted version lowered, in the ledger too", on_line(_admission_in_both), True),
]


ALL = [*KNOWN, *ABOUT]
