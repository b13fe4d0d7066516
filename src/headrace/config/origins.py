"""Where each value of a configuration comes from: the file, an override, the default, or the machine it runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.config.base import Config
from headrace.config.overrides import parse_override
from headrace.config.run import RunConfig

DEFAULT, CHOSEN, SET = "default", "chosen at the start", "--set"


class Value(NamedTuple):
    """One key's."""

    key: str
    """Dotted."""
    value: Any
    origin: str
    """`DEFAULT`, `CHOSEN`, `SET`, or the file."""


def values(
    given: RunConfig, resolved: RunConfig, file: Mapping[str, Any], where: str, overrides: Sequence[str]
) -> list[Value]:
    """Every key of `resolved`, which a run would begin with, in the order of the classes. `given` is what `file`,
    named `where`, and the overrides say."""
    sets = [".".join(parse_override(text)[0]) for text in overrides]
    before = dict(_leaves(given))
    found = []
    for key, value in _leaves(resolved):
        if any(key == one or key.startswith(one + ".") for one in sets):
            origin = SET
        else:
            origin = where if _stands_in(file, key) else DEFAULT
        found.append(Value(key, value, CHOSEN if before.get(key, value) != value else origin))
    return found


def _leaves(node: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and plain values; tables of a list count as one value, with the list."""
    tag = node.__struct_config__
    if tag.tag_field:
        yield f"{prefix}{tag.tag_field}", tag.tag
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, Config):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            yield f"{prefix}{name}", [dict(_leaves(one)) if isinstance(one, Config) else one for one in value]
        else:
            yield f"{prefix}{name}", value


def _stands_in(table: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True
