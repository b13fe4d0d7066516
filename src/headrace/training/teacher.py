"""Teachers for distillation: another model, or the policy as it was some versions ago.

    version      0 ── every ── 2·every ── 3·every        (self-distillation)
    teacher is   0       0        every     2·every
    put aside    0     every     2·every    3·every

Two copies of the parameters are held for it: the teacher, and the one to come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.models.divergence import Teacher as Said
from headrace.training.backends.base import Backend, Weights, open_backend
from headrace.training.config import DistillationConfig, TrainingConfig
from headrace.training.packing import Packed

_NOW, _NEXT = "now", "next"


class Teacher(Protocol):
    @property
    def version(self) -> int | None:
        """Of the policy, which it is; None: another model."""
        ...

    def say(self, packed: Packed) -> Said:
        """What it makes of the trained tokens' places."""
        ...

    def advance(self, version: int) -> None:
        """The policy, as it is now, has this version."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps of it."""
        ...

    def load_tensors(self, tensors: dict[str, Tensor]) -> None: ...


def open_teacher(config: TrainingConfig, backend: Backend) -> Teacher | None:
    if config.distillation is None:
        return None
    if config.distillation.teacher is None:
        return FormerSelf(backend, config.distillation)
    return OtherModel(config, backend)


class OtherModel:
    version: int | None = None

    def __init__(self, config: TrainingConfig, backend: Backend):
        assert config.distillation is not None
        folder = config.distillation.teacher
        assert folder is not None
        self._frozen = open_backend(Path(folder), msgspec.structs.replace(config, lora=None), frozen=True)
        if self._frozen.vocab_size != backend.vocab_size:
            raise ConfigError(
                "the model of training.distillation.teacher has the vocabulary of the run's",
                f"{self._frozen.vocab_size} tokens in {folder}, {backend.vocab_size} in the run's",
                "name a model with the same tokenizer",
            )

    @torch.no_grad()
    def say(self, packed: Packed) -> Said:
        return Said(*self._frozen.hidden(packed))

    def advance(self, version: int) -> None: ...

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None: ...


class FormerSelf:
    def __init__(self, backend: Backend, config: DistillationConfig):
        self._backend, self._every = backend, config.every
        self._held: dict[str, tuple[int, Weights]] = {}

    @property
    def version(self) -> int | None:
        return self._held[_NOW][0]

    @torch.no_grad()
    def say(self, packed: Packed) -> Said:
        return Said(*self._backend.hidden(packed, self._held[_NOW][1]))

    def advance(self, version: int) -> None:
        if not self._held:
            self._held = dict.fromkeys((_NOW, _NEXT), (version, self._backend.snapshot()))
        elif version - self._held[_NEXT][0] >= self._every:
            self._held = {_NOW: self._held[_NEXT], _NEXT: (version, self._backend.snapshot())}

    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for role, (version, weights) in self._held.items():
            found[f"{role}/version"] = torch.tensor(version)
            found |= {f"{role}/weights/{name}": tensor for name, tensor in weights.items()}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """A checkpoint without any begins anew."""
        self._held = {}
        if not tensors:
            return
        like = self._backend.snapshot()
        for role in (_NOW, _NEXT):
            weights = {name: tensors[f"{role}/weights/{name}"].to(own, copy=True) for name, own in like.items()}
            self._held[role] = (int(tensors[f"{role}/version"]), weights)
