"""What is wrong with a configuration, in its own words: msgspec's messages with dotted paths and remedies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.config import schema
from headrace.errors import ConfigError

_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_PART = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


def explain(error: msgspec.ValidationError, data: Mapping[str, Any], origin: Callable[[str], str]) -> ConfigError:
    """`origin` says where a dotted key was set: a file's name, or the override itself."""
    match = _MESSAGE.fullmatch(str(error))
    assert match is not None
    path = _path(match["path"] or "", data)
    if unknown := _UNKNOWN.fullmatch(match["what"]):
        return _unknown([*path, unknown[1]], data, origin)
    if missing := _MISSING.fullmatch(match["what"]):
        return _missing([*path, missing[1]], data)
    dotted = _dotted(match["path"] or "", path)
    got = _value_at(path, data)
    remedy = f"correct it where it is set: {origin(dotted)}"
    kind = schema.type_at(path, data)
    if tags := _tags(path, data):
        return ConfigError(f"{dotted} is one of {tags}", got, remedy)
    if kind is None:
        return ConfigError(f"{dotted}: {match['what']}", got, remedy)
    return ConfigError(f"{dotted} is {schema.describe(kind)}", got, remedy)


def _path(text: str, data: Mapping[str, Any]) -> list[str]:
    """A place's keys and numbers, of msgspec's text for it, which has [...] for a name that the user chose."""
    first, *rest = text.split("[...]")
    path = [name or index for name, index in _PART.findall(first)]
    for part in rest:
        named, table = schema.type_at(path, data), _value_at(path, data)
        inner = named.value_type if isinstance(named, msgspec.inspect.DictType) else None
        if not isinstance(inner, msgspec.inspect.StructType):
            break
        path += [next((name for name, one in table.items() if not _fits(one, inner.cls)), "")]
        path += [name or index for name, index in _PART.findall(part)]
    return path


def _fits(value: Any, kind: type) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _dotted(text: str, path: Sequence[str]) -> str:
    return (".".join(path) if "[...]" in text else text.lstrip(".")) or "the configuration"


def _unknown(path: Sequence[str], data: Mapping[str, Any], origin: Callable[[str], str]) -> ConfigError:
    dotted = ".".join(path)
    remedy = f"{schema.suggest(path, data)} (it is set here: {origin(dotted)})"
    return ConfigError("a configuration has only known keys", dotted, remedy)


def _missing(path: Sequence[str], data: Mapping[str, Any]) -> ConfigError:
    dotted = ".".join(path)
    if tags := _tags(path, data):
        return ConfigError(f"{dotted} is required", None, f"set {dotted} to one of {tags}")
    kind = schema.type_at(path, data)
    if kind is not None and (tables := schema.tables(kind)):
        inner = _tags([*path, tables[0].tag_field or ""], data)
        needs = [f"type, one of {inner}"] if inner else [field.name for field in tables[0].fields if field.required]
        return ConfigError(f"{dotted} is required", None, f"add a table [{dotted}] with {', '.join(needs)}")
    return ConfigError(
        f"{dotted} is required", None, f"set {dotted} to {schema.describe(kind) if kind else 'a value'}"
    )


def _tags(path: Sequence[str], data: Mapping[str, Any]) -> str:
    """The known values, where `path` is the key that chooses among a union's variants."""
    table = schema.type_at(path[:-1], data) if path else None
    variants = [one for one in schema.tables(table) if one.tag_field == path[-1]] if table is not None else []
    return ", ".join(f'"{variant.tag}"' for variant in variants)


def _value_at(path: Sequence[str], data: Any) -> Any:
    for part in path:
        data = data[int(part)] if isinstance(data, list | tuple) else data[part]
    return data
