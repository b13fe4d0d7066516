"""From a TOML file and `--set` overrides to a checked configuration.

    parse ──▶ override ──▶ convert to types ──▶ check() of every node ──▶ look outside: model, tasks, references

Every step refuses with an InputError, within seconds and without torch.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.base import Config
from headrace.config.outside import check_outside
from headrace.config.overrides import apply_overrides, merge, parse_override
from headrace.config.problems import explain
from headrace.config.run import RunConfig
from headrace.config.schema import with_default_types
from headrace.config.toml import MAX_BYTES, parse_toml
from headrace.errors import ConfigError, short


def load_config(
    path: str | Path, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration in `path`, over the values of `base`, under `overrides`; all of it checked."""
    config = read_config(path, overrides, base)
    check_outside(config)
    return config


def read_config(
    path: str | Path, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> RunConfig:
    """The same without looking at anything but the file: for the stored configuration of a run."""
    return config_of_table(merge(base or {}, read_toml(Path(path))), overrides, short(path))


def config_of(
    given: RunConfig | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A configuration that Python code gives, checked as a file is: an object, a dict of tables, a file's path."""
    if isinstance(given, str | Path):
        return read_config(Path(given), overrides, base)
    if not isinstance(given, RunConfig | Mapping):
        raise ConfigError(
            "a configuration is a headrace.RunConfig, a dict of tables like a file's, or a file's path",
            type(given).__name__,
            'for example {"model": {"path": …}, "tasks": {"type": "jsonl", "path": …}}',
        )
    return config_of_table(merge(base or {}, table_of(given)), overrides, "in Python")


def table_of(node: Config | Mapping[str, Any]) -> dict[str, Any]:
    """The tables and values of a configuration that Python code gives, as a file has them. Other kinds of numbers
    become Python's own, and paths texts; what no file could hold stays, and is refused like any wrong value."""
    if isinstance(node, Config):
        tag = node.__struct_config__
        fields = {field.name: (field.default, getattr(node, field.name)) for field in msgspec.structs.fields(node)}
        table = {name: value for name, (default, value) in fields.items() if (value, default) != (None, None)}
        node = {tag.tag_field: tag.tag, **table} if tag.tag_field else table
    return {key: _plain_value(value) for key, value in node.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Config | Mapping):
        return table_of(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Number) and not isinstance(value, bool | int | float):
        return (
            int(value)
            if isinstance(value, numbers.Integral)
            else float(value)
            if isinstance(value, numbers.Real)
            else value
        )
    return value


def config_of_text(text: str, where: str) -> RunConfig:
    """The configuration in a text that `dump_config` wrote; `where` it stands, for errors."""
    return config_of_table(_parsed(text, where), (), where)


def config_of_table(filed: dict[str, Any], overrides: Sequence[str], where: str) -> RunConfig:
    """The configuration of these tables under overrides, checked; `where` they stand, for errors."""
    data = with_default_types(apply_overrides(filed, overrides))
    set_by = {".".join(parse_override(text)[0]): text for text in overrides}

    def origin(dotted: str) -> str:
        for key, text in reversed(set_by.items()):
            beneath = key.startswith(dotted + ".") and not _holds(filed, dotted)
            if beneath or dotted == key or dotted.startswith((key + ".", key + "[")):
                return f"--set {short(text)}"
        return where

    try:
        config = msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        raise explain(error, data, origin) from None
    except (OverflowError, RecursionError) as error:
        raise ConfigError(f"{where} and --set give values of usual sizes", str(error)) from error
    check_config(config)
    return config


def _holds(table: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True


def read_toml(file: Path) -> dict[str, Any]:
    name = short(file)
    try:
        if not file.is_file():
            what = "is a folder, not a file" if file.is_dir() else "does not exist"
            raise ConfigError(f"the configuration file {what}", str(file), "give the path of a TOML file")
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} can be read", str(error), "check its permissions") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name} has at most {MAX_BYTES:,} bytes", None, "keep data in files of their own")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.object[error.start]:#04x} at {error.start}: {error.reason}"
        raise ConfigError(f"{name} is UTF-8 text", what, "save it as UTF-8") from error
    return _parsed(text, name)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{where} is valid TOML", str(error), _line(text, str(error))) from error


def _line(text: str, problem: str) -> str:
    place = re.search(r"at line (\d+)", problem)
    if place is None:
        return "correct the file"
    line = text.split(_NEWLINE)[int(place[1]) - 1].strip()
    remedy = f"correct line {place[1]}: {short(line)}"
    if _BARE_TEXT.fullmatch(line):
        remedy += " (a text stands in quotation marks; the others are numbers, true and false)"
    return remedy


_BARE_TEXT = re.compile(r"[\w.-]+\s*=\s*[A-Za-z_./~][^\"'\[{]*")


_NEWLINE = "\n"
"""What TOML counts lines by."""


def check_config(config: RunConfig) -> None:
    """Run every node's own check, inner ones first."""
    _check(config, "")


def _check(node: Config, prefix: str) -> None:
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, Config):
            _check(value, f"{prefix}{name}.")
        elif isinstance(value, tuple):
            for place, item in enumerate(value):
                if isinstance(item, Config):
                    _check(item, f"{prefix}{name}[{place}].")
        elif isinstance(value, dict) and any(isinstance(item, Config) for item in value.values()):
            for key, item in value.items():
                _check(item, f"{prefix}{name}.{short(key)}.")
        elif isinstance(value, dict):
            _check_options(value, f"{prefix}{name}", 1)
        elif isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{prefix}{name} is a text without NUL characters", value, f"correct {prefix}{name}")
        elif isinstance(value, int | float):
            _check_size(value, f"{prefix}{name}")
    node.check()


def _check_size(value: float, key: str) -> None:
    most = _MOST_SECONDS if key.endswith("_s") else _MOST_NUMBER
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} is a finite number", value, f"set {key} to one")
    if abs(value) > most:
        raise ConfigError(f"{key} is at most {most:,}", value, f"lower {key}")


_MOST_SECONDS = 10**9
"""More than thirty years. Operating systems' clocks and time-outs can be told so much."""
_MOST_NUMBER = 2**53
"""Whole numbers up to here are exact in every format and language that a configuration passes through."""


def _check_options(value: Any, key: str, depth: int) -> None:
    """What is handed to users' code travels in a message."""
    if depth > _DEEPEST_OPTIONS:
        raise ConfigError(f"{short(key)} is nested at most {_DEEPEST_OPTIONS} deep", None, "flatten it")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(f"{short(key)} is an integer of at most 64 bits", value, "write it as text")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _check_options(item, f"{key}.{name}", depth + 1)


_DEEPEST_OPTIONS = 100
