"""Checkpoints: folders that are whole or absent.

    checkpoints/step-000050/
        weights.safetensors      the float32 parameters under their Hugging Face names, or an adapter's alone
        optimizer.safetensors    AdamW's moments and step counts
        teacher.safetensors      in self-distillation: the teacher, and the one to come
        random.json              the states of torch's, NumPy's and Python's generators
        state.json               format, step, version, training.lora, the mismatch last seen, the caller's state;
                                 size and CRC-32 of each file above; digest of all that state.json says

A checkpoint is written under a temporary name, brought to the disk and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.errors import RunFolderError
from headrace.training.checkpoint_state import damaged, fingerprint, read_state, write_state
from headrace.training.config import LoraConfig
from headrace.training.sums import NEVER_SEEN, Mismatch

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.json"
TEACHER = "teacher.safetensors"
_TEMPORARY, _REPLACED = ".tmp-", ".old-"


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer needs to go on as if it had never stopped."""

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    step: int
    """Training steps done."""
    version: int
    state: dict[str, Any]
    random: dict[str, Any]
    lora: LoraConfig | None = None
    """Where the weights are an adapter's."""
    teacher: Mapping[str, torch.Tensor] = field(default_factory=dict)
    mismatch: Mismatch = NEVER_SEEN


def save(folder: str | Path, checkpoint: Checkpoint) -> str:
    """Write the checkpoint and return its digest. `folder` appears whole or not; one that was there before is
    replaced. RunFolderError where the disk does not take it."""
    with disk_told(folder, "a checkpoint"), whole_folder(folder) as temporary:
        save_tensors(temporary / WEIGHTS, checkpoint.weights)
        save_tensors(temporary / OPTIMIZER, checkpoint.optimizer)
        if checkpoint.teacher:
            save_tensors(temporary / TEACHER, checkpoint.teacher)
        (temporary / RANDOM).write_text(json.dumps(checkpoint.random))
        return write_state(
            temporary,
            {
                "step": checkpoint.step,
                "version": checkpoint.version,
                "state": checkpoint.state,
                "lora": msgspec.to_builtins(checkpoint.lora),
                "mismatch_seen": list(checkpoint.mismatch),
            },
        )


def load(folder: str | Path) -> Checkpoint:
    """Read a checkpoint, every byte checked. Raises RunFolderError for one that is missing or damaged."""
    folder = Path(folder)
    content = read_state(folder)
    for name, expected in content["files"].items():
        file = folder / name
        if not file.is_file() or fingerprint(file) != expected:
            raise damaged(folder, f"{name} is missing or not what was written")
    try:
        return Checkpoint(
            weights=load_file(folder / WEIGHTS),
            optimizer=load_file(folder / OPTIMIZER),
            step=content["step"],
            version=content["version"],
            state=content["state"],
            random=json.loads((folder / RANDOM).read_text()),
            lora=msgspec.convert(content.get("lora"), LoraConfig | None),
            teacher=load_file(folder / TEACHER) if TEACHER in content["files"] else {},
            mismatch=Mismatch(*content.get("mismatch_seen", NEVER_SEEN)),
        )
    except (SafetensorError, msgspec.ValidationError, ValueError, OSError) as error:
        raise damaged(folder, str(error)) from error


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name + _TEMPORARY, dir=folder.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _to_disk(path)
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=folder.name + _REPLACED, dir=folder.parent))
            folder.rename(replaced / folder.name)
            temporary.rename(folder)
            shutil.rmtree(replaced)
        else:
            temporary.rename(folder)
        _to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def save_file_whole(file: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file that appears whole or not. RunFolderError where the disk does not take it."""
    file = Path(file)
    temporary = file.with_name(f"{file.name}{_TEMPORARY}{os.getpid()}")
    with disk_told(file, "a version's weights"):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_tensors(temporary, tensors)
            _to_disk(temporary)
            temporary.replace(file)
            _to_disk(file.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def disk_told(path: str | Path, what: str) -> Iterator[None]:
    """Errors of the disk with the path and what helps."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"{what} can be written: {error}",
            str(path),
            "look at the disk's free space and the folder's permissions; then --resume goes on",
        ) from error


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
