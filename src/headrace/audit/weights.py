"""Kept weights and checkpoints against what was published and what the ledger has."""

from __future__ import annotations

from pathlib import Path

from headrace.audit.events import Published
from headrace.audit.evidence import Evidence
from headrace.audit.findings import CORRUPTION, LEDGER, SWAP, Findings, some
from headrace.audit.versions import Tree
from headrace.errors import InputError
from headrace.sync import version_digest
from headrace.telemetry.folder import RunFolder
from headrace.training.checkpoint_state import fingerprint, read_state


def check_weights(evidence: Evidence, tree: Tree, published: Published, findings: Findings) -> None:
    """Each kept version is what was published under its number; each checkpoint is of the ledger's version."""
    if evidence.folder is None:
        return
    files = sorted(evidence.folder.versions.glob("*.safetensors"))
    kept = {int(file.stem): file for file in files if file.stem.isdecimal()}
    for number, file in kept.items():
        if number not in tree.versions and not evidence.crashed:
            findings.add(LEDGER, f"version {number}", f"{file.name} is kept, and the ledger has no such version")
        if number in published.checksums:
            findings.checked["kept_versions"] += 1
            if (found := digest_of_kept(file, evidence.config.engine.dtype)) != published.checksums[number]:
                what = f"the weights in {file.name} are not those that were published ({found})"
                findings.add(SWAP, f"version {number}", what)
    if gone := published.kept & tree.versions.keys() - kept.keys():
        findings.unchecked["weights of kept versions"] = f"deleted since: {some(gone)}"
    _check_checkpoints(evidence, tree, evidence.folder, findings)


def check_checkpoint_bytes(folder: RunFolder, findings: Findings) -> None:
    """Every file of every checkpoint has the bytes that its state.json says. Reads all of them."""
    for path in sorted(folder.checkpoints.glob("step-*")):
        try:
            files = read_state(path)["files"]
        except InputError:
            continue  # `check_weights` tells of it
        for name, expected in files.items():
            findings.checked["checkpoint_files"] += 1
            if fingerprint(path / name) != expected:
                findings.add(CORRUPTION, f"{path.name}/{name}", "its bytes are not those that were written")


def digest_of_kept(file: Path, dtype: str) -> int | str:
    """As `version_digest` of what was published of these weights; why not, where the file cannot be read."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from headrace.sync.digest import digests

    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        return str(error)
    kind = getattr(torch, dtype)
    cast = {name: t.to(kind) if t.is_floating_point() else t for name, t in tensors.items()}
    return version_digest(dict(zip(cast, digests(list(cast.values())), strict=True)))


def _check_checkpoints(evidence: Evidence, tree: Tree, folder: RunFolder, findings: Findings) -> None:
    known: dict[str, tuple[int, int]] = {}
    for version, step, digest in evidence.ledger.rows("SELECT version, step, digest FROM checkpoints"):
        known[digest] = version, step
        row = tree.versions.get(version)
        if row is None or (row.step != step and not row.was_lost):
            has = "no such version" if row is None else f"it at step {row.step}"
            findings.add(LEDGER, f"version {version}", f"checkpointed at step {step}, and the ledger has {has}")
    newest = max((version for version, _ in known.values()), default=-1)
    alive = [step for version, step in known.values() if version in tree.surviving]
    if alive and not (folder.checkpoints / f"step-{max(alive):06d}").is_dir():
        findings.unchecked["the newest checkpoint"] = f"step-{max(alive):06d} was deleted since"
    for path in sorted(folder.checkpoints.glob("step-*")):
        if not path.name[5:].isdecimal():
            continue
        findings.checked["checkpoints"] += 1
        try:
            state = read_state(path)
        except InputError as error:
            findings.add(LEDGER, path.name, f"{error.rule} ({error.value})")
            continue
        said = state["version"], state["step"]
        if known.get(state["digest"]) not in (said, None) or said[1] != int(path.name[5:]):
            findings.add(LEDGER, path.name, f"it is of version {said[0]} and step {said[1]}")
        elif state["digest"] not in known and not (evidence.crashed and said[0] > newest):
            findings.add(LEDGER, path.name, "it is not a checkpoint that the ledger has")
