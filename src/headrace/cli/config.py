"""`headrace config`: what a run would begin with, and where each value comes from."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from headrace.cli.output import print_json
from headrace.config.dump import toml_value
from headrace.config.load import config_of_table, read_toml
from headrace.config.origins import Value, values
from headrace.errors import short
from headrace.orchestration.folder import resolved


def command(file: Path, sets: list[str], *, json: bool) -> None:
    table = read_toml(file)
    given = config_of_table(table, sets, short(file))
    found = values(given, resolved(given), table, str(file), sets)
    if json:
        print_json({"values": {one.key: {"value": one.value, "origin": one.origin} for one in found}})
    else:
        print(as_toml(found), end="")


def as_toml(found: list[Value]) -> str:
    """A configuration file, with each value's origin beside it. TOML has no null: a key without a value is a
    comment."""
    lines: list[str] = []
    # Keys before tables: what stands below a header belongs to it.
    ordered = sorted(found, key=lambda one: ("." in one.key, _first_place(one, found)))
    for table, keys in groupby(ordered, key=lambda one: one.key.rpartition(".")[0]):
        lines += ["", f"[{table}]"] if table else []
        for one in keys:
            name = one.key.rpartition(".")[2]
            text = f"# {name} =" if one.value is None else f"{name} = {toml_value(one.value, (one.key,))}"
            lines.append(f"{text:<50}  # {one.origin}")
    return "\n".join(lines) + "\n"


def _first_place(one: Value, found: list[Value]) -> int:
    """Where the key's table begins."""
    table = one.key.rpartition(".")[0]
    return next(place for place, other in enumerate(found) if other.key.rpartition(".")[0] == table)
