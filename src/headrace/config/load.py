"""From a TOML file and `--set` overrides to a checked configuration.

    parse ──▶ override ──▶ convert to types ──▶ check() of every node ──▶ look outside: model, tasks, references

Every step refuses with an InputError, within seconds and without torch.
"""

from __future__ import annotations

import math
import re
import tomllib
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
from headrace.errors import ConfigError


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
    return _converted(merge(base or {}, read_toml(Path(path))), overrides, str(path))


def config_of_text(text: str, where: str) -> RunConfig:
    """The configuration in a text that `dump_config` wrote; `where` it stands, for errors."""
    return _converted(parse_toml(text, where), (), where)


def _converted(filed: dict[str, Any], overrides: Sequence[str], where: str) -> RunConfig:
    data = with_default_types(apply_overrides(filed, overrides))
    set_by = {".".join(parse_override(text)[0]): text for text in overrides}

    def origin(dotted: str) -> str:
        for key, text in reversed(set_by.items()):
            beneath = key.startswith(dotted + ".") and not _holds(filed, dotted)
            if beneath or dotted == key or dotted.startswith((key + ".", key + "[")):
                return f"--set {text}"
        return where

    try:
        config = msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        raise explain(error, data, origin) from None
    check_config(config)
    return config


def _holds(table: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return True


def read_toml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        what = "is a folder, not a file" if file.is_dir() else "does not exist"
        raise ConfigError(f"the configuration file {what}", str(file), "give the path of a TOML file")
    try:
        return parse_toml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is UTF-8 text", str(error), "save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{file} can be read", str(error), "check its permissions") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is valid TOML", str(error), _line(text, str(error))) from error


def _line(text: str, problem: str) -> str:
    place = re.search(r"at line (\d+)", problem)
    if place is None:
        return "correct the file"
    return f"correct line {place[1]}: {text.splitlines()[int(place[1]) - 1].strip()}"


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
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}{name} is a finite number", value, f"set {prefix}{name} to one")
    node.check()
