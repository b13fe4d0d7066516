"""`headrace doctor`: what this machine can run, and what is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headrace import __version__
from headrace.cli.output import console, facts_of, only_json, print_json, table_of
from headrace.config.load import load_config
from headrace.memory_plan import Plan
from headrace.memory_plan.table import as_json, plan_lines

GIB = 1 << 30
_PROBE = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    found.append({"name": p.name, "memory_gib": p.total_memory / 2**30, "capability": f"{p.major}.{p.minor}"})
print(json.dumps({"devices": found}))
"""


def command(file: Path | None, sets: list[str], *, json: bool) -> None:
    with only_json(json):
        plan = None if file is None else plan_from(file, sets)
    found = examine()
    if json:
        print_json(found if plan is None else {**found, "memory_plan": as_json(plan)})
    else:
        _print(found)
        if plan is not None:
            _print_plan(plan)
    if plan is not None:
        plan.check()


def plan_from(file: Path, sets: list[str]) -> Plan:
    """What a run of this configuration would take here, and what it would choose."""
    from headrace.orchestration.folder import check_devices, resolved
    from headrace.orchestration.planning import plan_of

    config = load_config(file, sets)
    check_devices(config)
    plan = plan_of(resolved(config), Path("runs") / (config.name or file.stem))
    assert plan is not None  # the folder was just read
    return plan


def _print_plan(plan: Plan) -> None:
    out = console()
    out.print()
    rows: list[dict[str, Any]] = []
    for who in plan.processes:
        for need in plan.needs:
            if need.who == who:
                rows.append({"process": who, "where": need.where, "what": need.what, "GiB": need.bytes / GIB})
    out.print(table_of(rows, title="Memory plan"))
    for line in plan_lines(plan)[:1] + plan_lines(plan)[1 + len(plan.processes) :]:
        out.print(line.strip())


def examine() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    cuda = _cuda()
    shm = _space("/dev/shm")
    versions: dict[str, str | None] = {"headrace": __version__, "python": platform.python_version()}
    versions |= {name: _installed(name) for name in ("torch", "transformers", "numpy", "safetensors", "tokenizers")}
    answer: dict[str, Any] = {
        "versions": versions,
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": {"total": memory.total / GIB, "available": memory.available / GIB},
        "cuda": cuda,
        "shared_memory_gib": shm,
        "disk_gib": _space("."),
        "extras": extras(),
    }
    answer["can_run"], answer["problems"] = _verdict(answer)
    return answer


def _cuda() -> dict[str, Any]:
    """Asked of torch in a process of its own, so that a broken driver cannot take the doctor with it."""
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"devices": [], "problem": str(error)}
    if done.returncode != 0:
        return {"devices": [], "problem": (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]}
    answer: dict[str, Any] = msgspec.json.decode(done.stdout)
    return answer


def _space(path: str) -> dict[str, float] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total / GIB, "free": usage.free / GIB}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def extras() -> dict[str, dict[str, Any]]:
    """Headrace's optional dependencies, as its own package states them."""
    found: dict[str, dict[str, Any]] = {}
    try:
        requirements = metadata.requires("headrace") or []
    except metadata.PackageNotFoundError:
        return {}
    for requirement in requirements:
        marker = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        package = re.match(r"[A-Za-z0-9._-]+", requirement)
        if marker is None or package is None or package[0] == "headrace" or marker[1] == "dev":
            continue
        extra = found.setdefault(marker[1], {"installed": True, "packages": {}})
        extra["packages"][package[0]] = _installed(package[0])
        extra["installed"] = all(extra["packages"].values())
        extra["install"] = f"pip install 'headrace[{marker[1]}]'"
    return found


def _verdict(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    can, problems = [], []
    if found["versions"]["torch"] is None or "problem" in found["cuda"]:
        problems.append(f"torch does not work here: {found['cuda'].get('problem', 'not installed')}")
    else:
        can.append(f"generation and training on the CPU ({found['cpu_cores']} cores)")
        can += [f"generation and training on {device['name']}" for device in found["cuda"]["devices"]]
    # The segment is memory without a name, which the size of /dev/shm does not limit, or else a file.
    through = "memory" if hasattr(os, "memfd_create") else f"a file in {tempfile.gettempdir()}"
    can.append(f"weight transfer between processes (shared_memory: through {through})")
    if sys.platform == "win32":
        can, problems = [], [*problems, "runs need Linux or macOS: use the Windows Subsystem for Linux (WSL 2)"]
    if found["disk_gib"] and found["disk_gib"]["free"] < 1:
        problems.append(f"this folder's disk has only {found['disk_gib']['free'] * 1024:.0f} MiB free")
    return can, problems


def _print(found: dict[str, Any]) -> None:
    def space(value: dict[str, float] | None, part: str) -> str:
        return f"{value[part]:.1f} GiB {part} of {value['total']:.1f}" if value else "none"

    devices = [f"{one['name']}, {one['memory_gib']:.0f} GiB" for one in found["cuda"]["devices"]]
    facts = [(name, version or "missing") for name, version in found["versions"].items()]
    facts += [
        ("platform", found["platform"]),
        ("CPU cores", str(found["cpu_cores"])),
        ("memory", space(found["memory_gib"], "available")),
        ("CUDA", "; ".join(devices) or "no device"),
        ("/dev/shm", space(found["shared_memory_gib"], "free")),
        ("disk here", space(found["disk_gib"], "free")),
    ]
    out = console()
    out.print(facts_of(facts, title="This machine"))
    out.print()
    lines = [
        (
            "✓ installed" if one["installed"] else "✗ missing",
            f"{name}" + ("" if one["installed"] else f":  {one['install']}"),
        )
        for name, one in found["extras"].items()
    ]
    out.print(facts_of(lines, title="Extras"))
    out.print()
    out.print(
        facts_of(
            [("✓", text) for text in found["can_run"]] + [("✗", text) for text in found["problems"]],
            title="What can run here",
        )
    )
