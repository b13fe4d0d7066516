"""A plan, and what was measured beside it, as lines for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.memory_plan.choose import PLACES, Plan, gib
from headrace.memory_plan.needs import CONTEXT

MOST_NAMED = 3
"""Needs of a process that its line names."""


def plan_lines(plan: Plan) -> list[str]:
    """A line for the machine, one for each process, and one for what was chosen."""
    totals = [f"{where} {gib(plan.used(where))} of {gib(plan.available(where))}" for where in _places(plan)]
    lines = [f"memory plan, GiB: {', '.join(totals)}"]
    for who in plan.processes:
        parts = []
        for where in _places(plan):
            own = sorted((n for n in plan.needs if (n.who, n.where) == (who, where)), key=lambda n: -n.bytes)
            if own:
                named = ", ".join(f"{need.what} {gib(need.bytes)}" for need in own[:MOST_NAMED])
                parts.append(f"{where} {gib(sum(need.bytes for need in own))} ({named})")
        lines.append(f"  {who:12} {'; '.join(parts)}")
    if plan.chosen:
        lines.append(f"  chosen: {', '.join(f'{key} = {_toml(value)}' for key, value in plan.chosen.items())}")
    return lines


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.problem is None,
        "problem": plan.problem,
        "remedy": plan.remedy,
        "chosen": plan.chosen,
        "used_bytes": {where: plan.used(where) for where in PLACES},
        "available_bytes": {where: plan.available(where) for where in PLACES},
        "needs": [
            {"who": n.who, "where": n.where, "what": n.what, "bytes": n.bytes, "when": n.when} for n in plan.needs
        ],
    }


def beside(plan: Plan | None, measured: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """For each process what was planned and what it held at most, in bytes. A GPU's context, which no process can
    see, is in neither."""
    found: dict[str, Any] = {}
    for who in dict.fromkeys([*([] if plan is None else plan.processes), *measured]):
        planned = {} if plan is None else {where: plan.of(who, where) for where in _places(plan)}
        for need in () if plan is None else plan.needs:
            if need.who == who and need.what == CONTEXT:
                planned[need.where] -= need.bytes
        found[who] = {
            "planned": {where: amount for where, amount in planned.items() if amount},
            "measured": dict(measured.get(who, {})),
        }
    return found


def _places(plan: Plan) -> list[Any]:
    return [where for where in PLACES if where != "device" or plan.machine.has_device]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
