"""Configuration of weight sync. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config


class SyncConfig(Config):
    """How a version travels from the trainer to the engines."""

    transport: Literal["in_process", "shared_memory"] = "shared_memory"
    """How it is sent. `in_process` is for engine and trainer in one process (the library's primitives)."""
    schedule: Literal["never_stop", "blocking"] = "never_stop"
    """`never_stop`: swap between two forward passes while generation goes on. `blocking`: pause, then send."""
    kv: Literal["keep", "recompute"] = "keep"
    """What becomes of running sequences' keys and values at a swap."""
    interval: Annotated[int, Meta(ge=1)] = 1
    """Publish every so many training steps."""
    deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest any one stage may take, in seconds."""
