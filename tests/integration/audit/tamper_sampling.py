"""Forgeries of how a stored turn was sampled."""

from __future__ import annotations

import json

from forging import (
    Line,
    Tampering,
    on_turn,
    on_turns,
    set_support,
    support_rows,
)


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


def _asked(turn: Line) -> None:
    turn["sampling"]["temperature"] = 0.7
    turn["asked"] = ["temperature"]


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
        on_turn(lambda turn: turn.update(stop="end"), lambda turn: turn["stop"] == "length"),
        True,
    ),
    Tampering(
        "an ended turn called cut short",
        on_turn(lambda turn: turn.update(stop="cancelled"), lambda turn: turn["stop"] == "end"),
        True,
    ),
    Tampering("routes of experts that the model has not", on_turn(_routes), True),
    Tampering(
        "another temperature, called the call's own, where calls ask for nothing",
        on_turn(_asked),
        False,
        "plain",
    ),
]


ALL = [*SAMPLING]
