"""A checkpoint's state.json: what it says of itself and of the files beside it. No torch."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import xxhash

from headrace.errors import RunFolderError

FORMAT = 2
STATE = "state.json"
_ENTRIES = {"format": int, "step": int, "version": int, "state": dict, "files": dict, "digest": str}


def write_state(folder: Path, content: dict[str, Any]) -> str:
    """Write it, with the format and the files' fingerprints; returns its digest."""
    files = {file.name: fingerprint(file) for file in sorted(folder.iterdir())}
    content = {"format": FORMAT, **content, "files": files}
    content["digest"] = _digest(content)
    (folder / STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return str(content["digest"])


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote. RunFolderError where it is missing or something else, or where a file beside it has
    another size than it says. The files' bytes are for whoever loads them."""
    if not folder.is_dir():
        raise RunFolderError("a checkpoint is a folder", str(folder), "check the path")
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder, f"{STATE}: {error}") from error
    if not isinstance(content, dict):
        raise damaged(folder, f"{STATE} is not an object")
    if isinstance(content.get("format"), int) and content["format"] != FORMAT:
        raise RunFolderError(
            f"this Headrace reads checkpoints of format {FORMAT}, and this one is of format {content['format']}",
            str(folder),
            "use the Headrace that wrote it",
        )
    for name, kind in _ENTRIES.items():
        if not isinstance(content.get(name), kind):
            raise damaged(folder, f"{STATE} lacks {name!r}, or it is no {kind.__name__}")
    if content["digest"] != _digest(content):
        raise damaged(folder, f"{STATE} does not say what was written")
    for name, expected in content["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != expected["bytes"]:
            raise damaged(folder, f"{name} is missing or has another size")
    return content


def fingerprint(file: Path) -> dict[str, int]:
    """Size and CRC-32 of a file's bytes."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def damaged(folder: Path, how: str) -> RunFolderError:
    return RunFolderError(
        f"a checkpoint is complete and undamaged: {how}",
        str(folder),
        "resume from an earlier one with --from STEP",
    )


def _digest(content: dict[str, Any]) -> str:
    """Digest of all entries but the digest itself, whatever their order."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return xxhash.xxh3_64_hexdigest(json.dumps(rest, sort_keys=True).encode())
