"""What the processes of a run held in memory at most: asked of the system and of the components themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.usage import Usage

PATIENCE_S = 5.0

Peaks = dict[str, dict[str, int]]


def host_peak(pid: int | str = "self") -> int:
    """Most bytes of memory that the process has had resident, shared pages included; 0 where nobody can say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(found[0]) if found else 0


async def peaks_of(components: Mapping[str, Any], workers: Iterable[int]) -> Peaks:
    """By process. `components` have a `peer` and tell their `usage`; `workers` are process ids, added up."""
    found: Peaks = {"controller": {"host": host_peak(os.getpid())}}
    usages = await asyncio.gather(*map(_usage, components.values()))
    for (name, component), usage in zip(components.items(), usages, strict=True):
        own = {
            "host": host_peak(component.peer.process.pid),
            "device": usage.device_peak,
            "device_allocated": usage.device_allocated,
        }
        found[name] = {key: value for key, value in own.items() if value}
    found["workers"] = {"host": sum(map(host_peak, workers))}
    return found


async def _usage(component: Any) -> Usage:
    """Nothing of one that has just died or is stuck: the run may be ending because of it."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            usage: Usage = await component.usage()
            return usage
    except (HeadraceError, TimeoutError):
        return Usage()


def highest(one: Peaks, other: Peaks) -> Peaks:
    """Of two sessions of the same processes."""
    return {
        who: {
            key: max(one.get(who, {}).get(key, 0), other.get(who, {}).get(key, 0))
            for key in one.get(who, {}) | other.get(who, {})
        }
        for who in one | other
    }
