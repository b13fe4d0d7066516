"""Forgeries of stored turns: tokens, log-probs, versions, lineage, contexts and the graph they form."""

from __future__ import annotations

import json
from pathlib import Path

from forging import (
    Line,
    Tampering,
    cut_tokens,
    find,
    load,
    long,
    on_line,
    on_step,
    on_turn,
    on_turns,
    save,
    saw_swap,
    set_support,
    support_rows,
    swapped,
    text_of,
    tokens_of,
    versions_of,
)

# ── Sampled tokens and their log-probs ──────────────────────────────────────────────────────────────────


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
    turn = next(turn for turn in reversed(line["turns"]) if turn["stop"] == "end")
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
        on_line(_token_after_the_end, lambda line: any(t["stop"] == "end" for t in line["turns"])),
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


# ── Versions and lineage ────────────────────────────────────────────────────────────────────────────────


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


# ── Contexts and the graph of turns ─────────────────────────────────────────────────────────────────────


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


ALL = [*TOKENS, *VERSIONS, *CONTEXTS]
