"""A configuration as TOML that reads back as the same configuration."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from typing import Any

from headrace.config.base import Config
from headrace.config.run import RunConfig
from headrace.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}
_TIMES = (datetime.datetime, datetime.date, datetime.time)


def dump_config(config: RunConfig) -> str:
    """Every key with its value. TOML has no null: a key left out is None, which is then its default."""
    return dump_toml(_plain(config))


def _plain(node: Config) -> dict[str, Any]:
    tag = node.__struct_config__
    plain: dict[str, Any] = {tag.tag_field: tag.tag} if tag.tag_field else {}
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, tuple):
            plain[name] = [_plain(item) if isinstance(item, Config) else item for item in value]
        elif isinstance(value, dict):
            plain[name] = {key: _plain(item) if isinstance(item, Config) else item for key, item in value.items()}
        elif value is not None:
            plain[name] = _plain(value) if isinstance(value, Config) else value
    return plain


def dump_toml(table: Mapping[str, Any]) -> str:
    lines: list[str] = []
    _table(table, (), lines)
    return "\n".join(lines).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (values or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {toml_value(value, (*path, key))}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _table(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def toml_value(value: Any, path: tuple[str, ...]) -> str:
    """The value on one line; `path` is where it stands, for errors."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item, path) for item in value)}]"
    if isinstance(value, Mapping):
        items = (f"{_key(key)} = {toml_value(item, (*path, key))}" for key, item in value.items())
        return f"{{ {', '.join(items)} }}" if value else "{}"
    raise ConfigError(
        f"{'.'.join(path)} can be written as TOML", value, "use text, numbers, true or false, lists and tables"
    )


def _text(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(char) or _escape(char) for char in text) + '"'


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char
