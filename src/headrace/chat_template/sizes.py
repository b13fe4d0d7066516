"""How many steps it takes to look at a value: one a character, `ELEMENT` for each thing that it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from jinja2.runtime import Undefined

ELEMENT = 16
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
SCALARS = frozenset((bool, float, int, type(None), Undefined))
_SIZED = (*_SEQUENCES, bytes, dict, range)


def shallow_size(value: Any) -> int:
    if isinstance(value, str):
        return ELEMENT + len(value)
    if isinstance(value, _SIZED):
        return ELEMENT * (1 + len(value))
    return ELEMENT


def deep_size(value: Any, known: Mapping[int, int], most: float = float("inf")) -> int:
    """Steps to look at all of it, each reference by itself; not much more than `most` where it is larger.

    `known` are the sizes of objects by their identity.
    """
    size, waiting = 0, [value]
    while waiting and size <= most:
        one = waiting.pop()
        found = known.get(id(one))
        if found is not None:
            size += found
            continue
        size += shallow_size(one)
        if isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, _SEQUENCES) and size <= most:
            waiting += one
    return size


def copied(value: Any, known: dict[int, int], depth: int = 0) -> tuple[Any, int]:
    """A copy of plain types alone, and its deep size, which is `known` from then on for all that it consists of.

    What else users put into messages has methods that a sandbox cannot know.
    """
    if type(value) is str:
        return value, ELEMENT + len(value)
    if value is None or type(value) in (int, float, bool):
        return value, ELEMENT
    if depth > 100:
        raise ValueError("messages are nested deeper than 100 levels")
    if isinstance(value, np.generic):
        return copied(value.item(), known, depth + 1)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif callable(getattr(value, "model_dump", None)):
        # As objects of pydantic have it.
        value = value.model_dump()
    copy: Any
    size = ELEMENT
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            key, key_size = copied(key, known, depth + 1)
            copy[key], item_size = copied(item, known, depth + 1)
            size += key_size + item_size
    elif isinstance(value, list | tuple):
        copy = []
        for item in value:
            item, item_size = copied(item, known, depth + 1)
            copy.append(item)
            size += item_size
        if isinstance(value, tuple):
            copy = tuple(copy)
    elif isinstance(value, str):
        copy = str.__str__(value)
        size += len(copy)
    elif isinstance(value, int | float):
        copy = int(value) if isinstance(value, int) else float(value)
    else:
        copy = f"<{type(value).__name__}>"
        size += len(copy)
    if isinstance(copy, dict | list):
        known[id(copy)] = size
    return copy, size
