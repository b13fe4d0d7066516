"""`headrace bench`: measure this machine."""

from __future__ import annotations

import inspect
from typing import Any

from headrace.cli.benchmarks import BENCHMARKS
from headrace.cli.output import console, facts_of, number, only_json, print_json, table_of
from headrace.config.overrides import parse_override
from headrace.errors import ConfigError
from headrace.references import resolve


def command(name: str, sets: list[str], *, json: bool) -> None:
    if name not in BENCHMARKS:
        raise ConfigError("a benchmark is one of those known", name, f"known: {', '.join(BENCHMARKS)}")
    given = [parse_override(text) for text in sets]
    options = {".".join(parts): value for parts, value, _ in given}
    with only_json(json):
        run = resolve(BENCHMARKS[name])
        _check_options(name, run, options)
        result = run(**options)
    if json:
        print_json(result)
    else:
        _print(result)


def _check_options(name: str, run: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(run).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in options:
        if option not in known:
            raise ConfigError(f"an option of bench {name} is a known one", option, f"known: {', '.join(known)}")


def _print(result: dict[str, Any]) -> None:
    out = console()
    hardware = result.get("hardware")
    text = ", ".join(f"{k} {v}" for k, v in hardware.items()) if isinstance(hardware, dict) else str(hardware)
    rows = result.get("rows") or []
    for part in dict.fromkeys(row.get("part") for row in rows):
        own = [{k: v for k, v in row.items() if k != "part"} for row in rows if row.get("part") == part]
        title = f"bench {result.get('bench')}" + (f": {part}" if part else "")
        if len(own) == 1:
            out.print(facts_of([(name, number(value)) for name, value in own[0].items()], title=title))
        else:
            out.print(table_of(own, title=title))
    facts = [(name, number(value)) for name, value in result.get("figures", {}).items()]
    out.print(facts_of([*facts, ("hardware", text), ("commit", str(result.get("commit")))]))
