"""The layer rule: floor ← rooms ← pipeline ← orchestration, simulator, audit ← bench, cli.

A module imports from its own layer or below. A room reaches into another room only through that room's face: the
package itself (its lazy factory), base.py and config.py. Imports inside functions count too.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
FLOOR = {
    "errors",
    "records",
    "message_limits",
    "usage",
    "out_of_memory",
    "ipc",
    "workers",
    "bounds",
    "clocks",
    "references",
    "definitions",
    "model_files",
    "chat_template",
    "special_tokens",
    "tokenizer",
    "ledger",
    "kernels",
    "config.base",
}
ROOMS = {"rollout", "engine", "scoring", "buffer", "training", "sync", "models", "telemetry"}
PIPELINE = {"pipeline", "publication", "groups", "turns", "evaluation", "resume", "config", "memory_plan", "waits"}
ABOVE = {"orchestration", "simulator", "audit", "testing"}
TOP = {"bench", "cli", "__main__"}
FACES = {"base", "config", "memory_plan"}


def layer(name: str) -> int:
    """`name` is dotted, without the leading package."""
    head = name.split(".")[0]
    if name in FLOOR or head in FLOOR:
        return 0
    for number, members in enumerate((ROOMS, PIPELINE, ABOVE, TOP), start=1):
        if head in members:
            return number
    raise SystemExit(f"layers: {name} belongs to no layer; add it to .ci/layers.py")


def imports(file: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return [(line, name.removeprefix("headrace.")) for line, name in found if name.startswith("headrace.")]


def module_of(name: str) -> str:
    """The module a dotted import reaches: what is imported from it is left off."""
    parts = name.split(".")
    while parts and not _exists(parts):
        parts.pop()
    return ".".join(parts)


def _exists(parts: list[str]) -> bool:
    path = SOURCE.joinpath("headrace", *parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def problems() -> list[str]:
    found = []
    for file in sorted((SOURCE / "headrace").rglob("*.py")):
        own = ".".join(file.relative_to(SOURCE / "headrace").with_suffix("").parts).removesuffix(".__init__")
        if own == "__init__":
            continue
        for line, name in imports(file):
            other = module_of(name)
            if not other:
                continue
            where = f"{file.relative_to(SOURCE.parent)}:{line}"
            if layer(other) > layer(own):
                found.append(f"{where}: {own} imports {other}, which is above it")
            rooms = own.split(".")[0], other.split(".")[0]
            if layer(own) == layer(other) == 1 and rooms[0] != rooms[1]:
                inside = other.split(".")[1:]
                if inside and inside[0] not in FACES:
                    found.append(
                        f"{where}: {own} reaches into {other}; use {rooms[1]}'s base.py, config.py or package"
                    )
    return found


if __name__ == "__main__":
    broken = problems()
    print("\n".join(broken) if broken else "layers: every import goes down or sideways through a face")
    sys.exit(bool(broken))
