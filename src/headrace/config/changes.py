"""What of a configuration a resumed run may change, what differs between two, and what was edited since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config.base import Config
from headrace.config.run import RunConfig

MAY_CHANGE = ("training.steps", "evaluation", "limits", "recording", "name")
"""What a resumed run may set differently; everything else it keeps."""


def forbidden_changes(stored: RunConfig, given: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys that differ and may not, with the values before and after."""
    return [
        (key, before, after)
        for key, before, after in differences(stored, given)
        if not any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)
    ]


def differences(one: Config, other: Config, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    found: list[tuple[str, Any, Any]] = []
    for name in one.__struct_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, Config) and type(left) is type(right):
            found += differences(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append((prefix + name, left, right))
    return found


def edited(stored: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a run's stored configuration, with what was edited in its file since: `before` is what the file
    said when the run began, `now` what it says. What was not edited stays as it is stored, with the overrides that
    the run was started with."""
    result = dict(stored)
    for key in [*now, *(key for key in before if key not in now)]:
        old, new, held = before.get(key), now.get(key), stored.get(key)
        if key in before and key in now and old == new:
            continue
        if isinstance(held, Mapping) and isinstance(new, Mapping) and _kind(new, held) == held.get("type"):
            result[key] = edited(held, old if isinstance(old, Mapping) else {}, new)
        elif key in now:
            result[key] = new
        elif isinstance(held, Mapping) and isinstance(old, Mapping) and "type" not in held:
            result[key] = edited(held, old, {})
        elif held == old or isinstance(held, Mapping):
            result.pop(key, None)
    return result


def _kind(table: Mapping[str, Any], held: Mapping[str, Any]) -> Any:
    """A table that says no type is of the one it had."""
    return table.get("type", held.get("type"))
