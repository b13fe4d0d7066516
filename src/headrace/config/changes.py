"""What of a configuration a resumed run may change, and what differs between two."""

from __future__ import annotations

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
