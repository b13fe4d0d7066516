"""The plan's nouns: what a process needs, and what there is. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.config.run import RunConfig
from headrace.models.config import ModelConfig

Where = Literal["device", "host", "disk"]
When = Literal["always", "training", "generating"]

CONTEXT = "device context"
"""The need that is a GPU's context."""
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Need:
    """Bytes that one process holds for one purpose."""

    who: str
    """The process: "trainer", "engine-0", "engine-eval", "controller", "workers", or "weight sync" for the memory
    that trainer and engines share."""
    where: Where
    what: str
    bytes: int
    when: When = "always"
    """In whose turn, where engines and trainer take turns with the memory."""


@dataclass(frozen=True)
class Machine:
    """What one machine has, in bytes."""

    host_bytes: int
    """Memory that processes may have: what is available now, within the limit of a container."""
    disk_bytes: int
    """Free space where the run's folder is."""
    device_bytes: int = 0
    """Memory of the first GPU that is free now; 0 without one."""
    device_total: int = 0
    """All memory of that GPU."""
    device_name: str = ""

    @property
    def has_device(self) -> bool:
        return self.device_total > 0


@dataclass(frozen=True)
class Models:
    """The shapes of the models that a run loads."""

    policy: ModelConfig
    reference_parameters: int = 0
    """Of a reference policy that is a model of its own."""
    teacher_parameters: int = 0
    """Of a teacher that is another model."""
    stored: str = "float32"
    """The type of the policy's weights in its folder."""


def exported_itemsize(config: RunConfig, models: Models) -> int:
    """Bytes of one number of an exported model."""
    chosen = config.training.export_dtype
    return itemsize(models.stored if chosen == "model" else chosen)


def itemsize(dtype: str) -> int:
    """Bytes of one number. `auto` counts as float32, what it is on a CPU."""
    return 2 if dtype in ("bfloat16", "float16") else 4
