"""Teachers for distillation: another model, or the policy as it was some training steps ago.

    steps done     0 ── every ── 2·every ── 3·every        (self-distillation)
    teacher is of  0      0       every      2·every
    put aside      0    every    2·every     3·every

Two copies of the parameters are held for it: the teacher, and the one to come.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from headrace.errors import RunFolderError
from headrace.models import Said
from headrace.training.backends.base import Backend, Weights, open_backend
from headrace.training.config import DistillationConfig, TrainingConfig
from headrace.training.packing import Packed


class Teacher(Protocol):
    vocab_size: int

    @property
    def version(self) -> int | None:
        """Of the policy, which it is; None: another model."""
        ...

    def say(self, packed: Packed) -> Said:
        """What it makes of the trained tokens' places."""
        ...

    def advance(self, step: int, version: int) -> None:
        """The policy, as it is now, has this version after so many steps."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps of it."""
        ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` gave. On an error nothing has changed."""
        ...


def open_teacher(config: TrainingConfig, backend: Backend) -> Teacher | None:
    """Raises ModelFolderError where student or teacher cannot take part (`Backend.check_hidden`)."""
    if config.distillation is None:
        return None
    backend.check_hidden()
    if config.distillation.teacher is None:
        return FormerSelf(backend, config.distillation)
    return OtherModel(config, Path(config.distillation.teacher))


class OtherModel:
    version: int | None = None

    def __init__(self, config: TrainingConfig, folder: Path):
        self._frozen = open_backend(folder, msgspec.structs.replace(config, lora=None), frozen=True)
        self._frozen.check_hidden()
        self.vocab_size = self._frozen.vocab_size

    @torch.no_grad()
    def say(self, packed: Packed) -> Said:
        return Said(*self._frozen.hidden(packed))

    def advance(self, step: int, version: int) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None: ...


class _Snapshot(NamedTuple):
    step: int
    version: int
    weights: Weights


class FormerSelf:
    def __init__(self, backend: Backend, config: DistillationConfig):
        self._backend, self._every = backend, config.every
        self.vocab_size = backend.vocab_size
        self._now: _Snapshot | None = None
        self._next: _Snapshot | None = None
        """At first the same one."""

    @property
    def version(self) -> int | None:
        return None if self._now is None else self._now.version

    @torch.no_grad()
    def say(self, packed: Packed) -> Said:
        assert self._now is not None
        return Said(*self._backend.hidden(packed, self._now.weights))

    def advance(self, step: int, version: int) -> None:
        if self._next is None:
            self._now = self._next = _Snapshot(step, version, self._backend.snapshot())
        elif step - self._next.step >= self._every:
            self._now, self._next = self._next, _Snapshot(step, version, self._backend.snapshot())

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        held = {"now": self._now, "next": None if self._next is self._now else self._next}
        for role, snapshot in held.items():
            if snapshot is not None:
                found[f"{role}/step"] = torch.tensor(snapshot.step)
                found[f"{role}/version"] = torch.tensor(snapshot.version)
                found |= {f"{role}/weights/{name}": tensor for name, tensor in snapshot.weights.items()}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """A checkpoint without any begins anew."""
        now = self._read(tensors, "now") if tensors else None
        later = self._read(tensors, "next") if "next/step" in tensors else now
        self._now, self._next = now, later

    def _read(self, tensors: dict[str, Tensor], role: str) -> _Snapshot:
        like = self._backend.snapshot()
        missing = [name for name in like if f"{role}/weights/{name}" not in tensors]
        if missing:
            raise RunFolderError(
                "a checkpoint's teacher has the parameters of the model it is loaded into",
                missing[:5],
                "resume with the model the run was started with",
            )
        weights = {name: tensors[f"{role}/weights/{name}"].to(own, copy=True) for name, own in like.items()}
        return _Snapshot(int(tensors[f"{role}/step"]), int(tensors[f"{role}/version"]), weights)
