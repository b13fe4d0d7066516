"""Forgeries of the stored episodes, with or without the ledger's row of the same episode."""

from __future__ import annotations

import json
from pathlib import Path

from forging import (
    FIRST_STEP,
    Line,
    Tampering,
    cut_tokens,
    execute,
    find,
    groups_of,
    load,
    long,
    on_line,
    on_lines,
    on_step,
    on_turn,
    on_turns,
    rebook,
    save,
    saw_swap,
    set_support,
    settle,
    settle_advantages,
    step_files,
    support_rows,
    swapped,
    text_of,
    tokens_of,
    versions_of,
)

# ── Known to have gone unnoticed ─────────────────────────────────────────────────────────────────────────


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


# ── Sampled tokens and their log-probs ───────────────────────────────────────────────────────────────────


def _other_token(turn: Line) -> None:
    turn["tokens"][1] = (turn["tokens"][1] + 1) % 17


def _other_supported_token(line: Line) -> None:
    """Another token of the support, with the text that follows."""
    turn = next(turn for turn in line["turns"] if long(turn))
    row = [token for token in support_rows(turn)[1] if token not in (turn["tokens"][1], 17)]
    turn["tokens"][1] = row[0]
    line["text"] = text_of(line)


def _token_with_its_true_logprob(run: Path) -> None:
    """Another token in the last place of a turn that nothing continues, with the log-prob that the weights give it:
    only how it was drawn can tell."""
    from headrace.audit.kept import KeptVersions
    from headrace.audit.recompute import replay_logprobs
    from headrace.config.load import read_config
    from headrace.telemetry.episodes import read_episodes

    config = read_config(run / "config.toml")
    kept = KeptVersions(Path(config.model.path), run / "versions", config.engine)
    file, place = find(run, lambda line: line["turns"][-1]["stop"] == "length")
    lines = load(file)
    line, turn = lines[place], lines[place]["turns"][-1]
    turn["tokens"][-1] = next(t for t in support_rows(turn)[-1] if t not in (turn["tokens"][-1], 17))
    line["text"] = text_of(line)
    save(file, lines)
    item = list(read_episodes(run, line["step"]))[place]
    index = len(item.episode.turns) - 1
    again = replay_logprobs(kept.model, item.episode.full_context(index), item.episode.turns[index])
    turn["logprobs"][-1] = float(again[-1])
    save(file, lines)


def _two_tokens_exchanged(turn: Line) -> None:
    for column in (turn["tokens"], turn["logprobs"]):
        column[1], column[2] = column[2], column[1]
    rows = support_rows(turn)
    rows[1], rows[2] = rows[2], rows[1]
    set_support(turn, rows)


def _turns_exchanged(line: Line) -> None:
    first, second = line["turns"][:2]
    for column in ("tokens", "logprobs", "versions", "support", "stop"):
        first[column], second[column] = second[column], first[column]
    line["text"] = text_of(line)


def _last_token_cut(line: Line) -> dict[str, int]:
    cut_tokens(line["turns"][-1], slice(None, -1))
    line["text"] = text_of(line)
    return tokens_of(line) | versions_of(line)


def _token_after_the_end(line: Line) -> dict[str, int]:
    """Something is written after the token that ended the sequence."""
    turn = next(turn for turn in reversed(line["turns"]) if turn["stop"] == "stop")
    turn["tokens"].append(3)
    turn["logprobs"].append(-1.0)
    turn["versions"].append(turn["versions"][-1])
    set_support(turn, [*support_rows(turn), support_rows(turn)[-1] + [3]])
    line["text"] = text_of(line)
    return tokens_of(line)


def _shifted(turn: Line) -> None:
    turn["logprobs"] = turn["logprobs"][1:] + turn["logprobs"][:1]


def _logprobs_of_a_sibling(lines: list[Line]) -> None:
    pairs = [(a["turns"][0], b["turns"][0]) for a in lines for b in lines if a["id"] < b["id"]]
    one, other = next((a, b) for a, b in pairs if len(a["tokens"]) == len(b["tokens"]))
    one["logprobs"] = other["logprobs"]


def _scaled(turn: Line) -> None:
    turn["logprobs"] = [value * 1.1 for value in turn["logprobs"]]


def _lower_all_by_a_little(turn: Line) -> None:
    turn["logprobs"] = [value - 0.001 for value in turn["logprobs"]]


TOKENS = [
    Tampering("a sampled token replaced", on_turn(_other_token, long), True),
    Tampering(
        "a sampled token replaced by another of its support, text too",
        on_line(_other_supported_token, lambda line: any(long(t) for t in line["turns"])),
        True,
    ),
    Tampering(
        "a token replaced by another of its support with that one's true log-prob",
        _token_with_its_true_logprob,
        True,
    ),
    Tampering(
        "two tokens of a turn exchanged with log-probs and supports",
        on_turn(_two_tokens_exchanged, lambda t: long(t) and t["tokens"][1] != t["tokens"][2]),
        True,
    ),
    Tampering("tokens and log-probs of two turns exchanged", on_line(_turns_exchanged), True),
    Tampering(
        "a turn's last token cut off, in the ledger too",
        on_line(_last_token_cut, lambda line: line["turns"][-1]["stop"] == "length"),
        True,
    ),
    Tampering(
        "a token added after the end of a sequence, in the ledger too",
        on_line(_token_after_the_end, lambda line: any(t["stop"] == "stop" for t in line["turns"])),
        True,
    ),
    Tampering("log-probs of one turn moved by one token", on_turn(_shifted, long), True),
    Tampering("log-probs of all turns moved by one token", on_turns(_shifted), True),
    Tampering("log-probs taken from a sibling", on_step(_logprobs_of_a_sibling), True),
    Tampering("log-probs of all turns multiplied by 1.1", on_turns(_scaled), True),
    Tampering("log-probs of all turns lowered by 0.001", on_turns(_lower_all_by_a_little), True),
    Tampering("log-probs of one turn lowered by 0.001", on_turn(_lower_all_by_a_little, long), True),
    Tampering(
        "log-probs of one turn set to 0",
        on_turn(lambda turn: turn.update(logprobs=[0.0] * len(turn["tokens"]))),
        True,
    ),
    Tampering("a log-prob is not a number", on_turn(lambda turn: turn["logprobs"].__setitem__(0, "nan")), True),
]


# ── Versions and lineage ─────────────────────────────────────────────────────────────────────────────────


def _relabel(line: Line, by: int) -> dict[str, int]:
    """All of an episode under other versions, lineage and ledger too."""
    for turn in line["turns"]:
        turn["versions"] = [version + by for version in turn["versions"]]
        for event in turn["lineage"]:
            event["version"] += by
    return versions_of(line)


def _one_older(line: Line) -> dict[str, int]:
    line["admitted_version"] -= 1
    return _relabel(line, -1) | {"admitted_version": line["admitted_version"]}


def _hide_swap(line: Line) -> dict[str, int]:
    """As if a swap in mid-sequence had not been: tokens after it have the version before, the event is gone."""
    turn = next(turn for turn in line["turns"] if swapped(turn))
    turn["versions"] = [turn["versions"][0]] * len(turn["tokens"])
    turn["lineage"] = turn["lineage"][:1]
    return versions_of(line)


def _drop_swap_event(turn: Line) -> None:
    turn["lineage"].pop()


def _swap_later(turn: Line) -> None:
    """The swap fell one token later, in versions and lineage alike."""
    at = turn["versions"].index(turn["versions"][-1])
    turn["versions"][at] = turn["versions"][0]
    turn["lineage"][-1]["position"] += 1


def _swap_in_the_prompt(turn: Line) -> None:
    """A cache that was begun under an older version, where it was not."""
    turn["lineage"] = [
        {**turn["lineage"][0], "version": turn["lineage"][0]["version"] - 1},
        {**turn["lineage"][0], "position": 1, "cause": "swap"},
        *turn["lineage"][1:],
    ]


VERSIONS = [
    Tampering(
        "all of an episode one version older, in lineage, admission and ledger too", on_line(_one_older), True
    ),
    Tampering("a swap in mid-sequence hidden, in lineage and ledger too", on_line(_hide_swap, saw_swap), True),
    Tampering("a lineage event dropped", on_turn(_drop_swap_event, swapped), True),
    Tampering(
        "a swap moved by one token, in versions and lineage",
        on_turn(_swap_later, lambda t: swapped(t) and t["versions"][-1] == t["versions"][-2]),
        True,
    ),
    Tampering(
        "a kept cache called recomputed",
        on_turn(lambda turn: turn["lineage"][-1].update(before="recomputed"), swapped),
        True,
    ),
    Tampering(
        "all kept caches called recomputed",
        on_turns(lambda turn: [event.update(before="recomputed") for event in turn["lineage"][1:]]),
        True,
    ),
    Tampering(
        "a swap called a preemption",
        on_turn(lambda turn: turn["lineage"][-1].update(cause="preempt"), swapped),
        True,
    ),
    Tampering(
        "a swap invented within the prompt",
        on_turn(_swap_in_the_prompt, lambda turn: len(turn["context"]) > 2),
        True,
    ),
    Tampering(
        "a version of an adapter's base invented", on_turn(lambda turn: turn["lineage"][0].update(base=0)), True
    ),
]


# ── Contexts and the graph of turns ──────────────────────────────────────────────────────────────────────


def _drop_last_turn(line: Line) -> dict[str, int]:
    line["turns"].pop()
    line["text"] = text_of(line)
    return tokens_of(line) | versions_of(line)


def _double_last_turn(line: Line) -> dict[str, int]:
    line["turns"].append(json.loads(json.dumps(line["turns"][-1])))
    line["text"] = text_of(line)
    return tokens_of(line)


def _other_prompt(line: Line) -> None:
    line["task"]["prompt"] = "w1 w1 w1"
    line["turns"][0]["context"] = [1, 1, 1]


def _three(line: Line) -> bool:
    return len(line["turns"]) == 3


def _forked(turn: Line) -> bool:
    return bool(turn["joins"])


CONTEXTS = [
    Tampering(
        "a token of the prompt changed",
        on_turn(lambda turn: turn["context"].__setitem__(0, (turn["context"][0] + 1) % 16)),
        True,
    ),
    Tampering(
        "a prompt changed, its tokens too",
        on_line(_other_prompt),
        True,
    ),
    Tampering(
        "the words between two turns changed", on_line(lambda line: line["turns"][1].update(context=[4, 4])), True
    ),
    Tampering("a turn's parent removed", on_line(lambda line: line["turns"][1].update(parent=None)), True),
    Tampering("a turn's parent is another turn", on_turn(lambda turn: turn.update(parent=1), _forked), True),
    Tampering("joins dropped", on_turn(lambda turn: turn.update(joins=[]), _forked), True),
    Tampering("joins invented", on_line(lambda line: line["turns"][1].update(joins=[0])), True),
    Tampering("joins of a turn that is not there", on_turn(lambda turn: turn.update(joins=[7]), _forked), True),
    Tampering(
        "two turns in the other order",
        on_line(lambda line: line["turns"].insert(1, line["turns"].pop()), _three),
        True,
    ),
    Tampering("a turn removed, in the ledger too", on_line(_drop_last_turn, _three), True),
    Tampering("a turn doubled, in the ledger too", on_line(_double_last_turn, _three), True),
]


# ── How it was sampled ───────────────────────────────────────────────────────────────────────────────────


def _widen(turn: Line) -> None:
    """A support has one more token than was kept."""
    rows = support_rows(turn)
    rows[1] = sorted({*rows[1], next(token for token in range(18) if token not in rows[1])})
    set_support(turn, rows)


def _narrow(turn: Line) -> None:
    """A support has one token fewer than was kept, and not the sampled one."""
    rows = support_rows(turn)
    place = next(t for t, row in enumerate(rows) if len(row) > 1)
    rows[place].remove(next(token for token in rows[place] if token != turn["tokens"][place]))
    set_support(turn, rows)


def _whole_vocabulary(turn: Line) -> None:
    set_support(turn, [list(range(18)) for _ in turn["tokens"]])


def _untruncated(turn: Line) -> None:
    turn["support"] = None
    turn["sampling"]["top_p"] = 1.0


def _exchange_rows(turn: Line) -> None:
    """Two rows of a support, each of which contains both tokens."""
    rows = support_rows(turn)
    tokens = turn["tokens"]
    a, b = next(
        (a, b)
        for a in range(len(rows))
        for b in range(a)
        if rows[a] != rows[b] and {tokens[a], tokens[b]} <= {*rows[a]} & {*rows[b]}
    )
    rows[a], rows[b] = rows[b], rows[a]
    set_support(turn, rows)


def _exchangeable(turn: Line) -> bool:
    try:
        _exchange_rows(json.loads(json.dumps(turn)))
    except StopIteration:
        return False
    return True


def _foreign_ids(turn: Line) -> None:
    set_support(turn, [[*row, 5000] for row in support_rows(turn)])


def _wide(turn: Line) -> bool:
    return any(len(row) > 1 for row in support_rows(turn))


def _routes(turn: Line) -> None:
    count = len(turn["tokens"])
    turn["routes"] = {
        "shape": [count, 2, 1],
        "dtypes": ["<i4", "<f4"],
        "experts": [0] * (2 * count),
        "gates": [1.0] * (2 * count),
    }


SAMPLING = [
    Tampering("a turn's temperature changed", on_turn(lambda turn: turn["sampling"].update(temperature=1.0)), True),
    Tampering(
        "all turns' temperatures changed", on_turns(lambda turn: turn["sampling"].update(temperature=1.0)), True
    ),
    Tampering("a turn's top_p changed", on_turn(lambda turn: turn["sampling"].update(top_p=0.5)), True),
    Tampering("a turn's top_k invented", on_turn(lambda turn: turn["sampling"].update(top_k=2)), True),
    Tampering("a turn's min_p invented", on_turn(lambda turn: turn["sampling"].update(min_p=0.9)), True),
    Tampering("a turn called untruncated, its support removed", on_turn(_untruncated), True),
    Tampering(
        "a support widened by one token",
        on_turn(_widen, lambda turn: len(turn["tokens"]) > 1 and len(support_rows(turn)[1]) < 18),
        True,
    ),
    Tampering("a support narrowed by one token", on_turn(_narrow, _wide), True),
    Tampering("all supports widened to the whole vocabulary", on_turns(_whole_vocabulary), True),
    Tampering("two rows of a support exchanged", on_turn(_exchange_rows, _exchangeable), True),
    Tampering("supports with ids beyond the vocabulary", on_turn(_foreign_ids), True),
    Tampering(
        "a support invented where nothing was truncated",
        on_turn(lambda turn: set_support(turn, [[t] for t in turn["tokens"]])),
        True,
        "plain",
    ),
    Tampering("a turn's seed changed", on_turn(lambda turn: turn.update(seed=turn["seed"] + 1)), True),
    Tampering("all seeds set to 0", on_turns(lambda turn: turn.update(seed=0)), True),
    Tampering("a turn called another policy's", on_turn(lambda turn: turn.update(policy="judge")), True),
    Tampering("a turn called an adapter's", on_turn(lambda turn: turn.update(adapter="policy")), True),
    Tampering("an engine that is not there", on_turn(lambda turn: turn.update(engine="engine-7")), True),
    Tampering("the engine of evaluations", on_turns(lambda turn: turn.update(engine="engine-eval")), True),
    Tampering(
        "a truncated turn called ended by itself",
        on_turn(lambda turn: turn.update(stop="stop"), lambda turn: turn["stop"] == "length"),
        True,
    ),
    Tampering(
        "an ended turn called cut short",
        on_turn(lambda turn: turn.update(stop="cancelled"), lambda turn: turn["stop"] == "stop"),
        True,
    ),
    Tampering("routes of experts that the model has not", on_turn(_routes), True),
]


# ── What is said about an episode ────────────────────────────────────────────────────────────────────────


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

ALL = [*KNOWN, *TOKENS, *VERSIONS, *CONTEXTS, *SAMPLING, *ABOUT]
