"""`--set a.b=value`: one value of a configuration, from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.config import schema
from headrace.config.toml import parse_toml
from headrace.errors import ConfigError, short


def parse_override(text: str) -> tuple[tuple[str, ...], Any, str]:
    """The key's parts, the value (a TOML value where it is one, otherwise the text itself), and its text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("an override is UTF-8 text", ascii(short(text)), "check the shell's encoding") from error
    key, equals, value = text.partition("=")
    parts = _key_parts(key.strip())
    if not equals or parts is None:
        raise ConfigError("an override is written a.b=value", text, "for example: --set training.steps=20")
    return parts, _value(value.strip()), value.strip()


def _key_parts(key: str) -> tuple[str, ...] | None:
    try:
        table = parse_toml(f"{key} = 0") if "\n" not in key else {}
    except ValueError:
        return None
    parts: list[str] = []
    while isinstance(table, dict):
        if len(table) != 1:
            return None
        [(part, table)] = table.items()
        parts.append(part)
    return tuple(parts)


def _value(text: str) -> Any:
    try:
        table = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise ConfigError("an override's value is TOML, or text", text, short(error)) from error
    return table["value"] if len(table) == 1 else text


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`data` with each override put in, in order. A table given as a value replaces the table that was there.

    Where the configuration holds text, `--set name=123` is the text "123": a shell eats the quotes around it.
    """
    result = merge({}, data)
    for text in overrides:
        parts, value, raw = parse_override(text)
        table = result
        for depth, part in enumerate(parts[:-1], start=1):
            table = table.setdefault(part, {})
            if isinstance(table, list):
                path = short(".".join(parts[:depth]))
                raise ConfigError(f"{path} is set as a whole", text, f"write --set '{path}=[{{ … }}, …]'")
            if not isinstance(table, dict):
                path = short(".".join(parts[:depth]))
                raise ConfigError(f"{path} is a single value, not a table", text, "shorten the key")
        written_as_text = isinstance(value, str) or not schema.is_text(schema.type_at(parts, result))
        table[parts[-1]] = value if written_as_text else raw
    return result


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, tables within tables; where they meet, `above` wins."""
    result = dict(below)
    for key, value in above.items():
        beneath = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merge(beneath if isinstance(beneath, Mapping) else {}, value)
        else:
            result[key] = value
    return result
