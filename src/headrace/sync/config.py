"""Configuration of weight sync. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError


class SyncConfig(Config):
    """How a version travels from the trainer to the engines."""

    transport: Literal["in_process", "shared_memory"] = "shared_memory"
    """How it is sent. `in_process` is for engine and trainer in one process (the library's primitives)."""
    schedule: Literal["never_stop", "blocking"] = "never_stop"
    """`never_stop`: swap between two forward passes while generation goes on. `blocking`: pause, then send."""
    interrupt: Literal["keep", "recompute", "resume", "retry", "drain"] = "keep"
    """What a swap does to running requests. `keep`: they go on, their keys and values as they are. `recompute`:
    they go on, and those are computed again. `resume`: they are aborted and go on from their tokens so far, which
    an environment does not notice. `retry`: they begin again. `drain`: the swap waits until they have ended, and
    no new one begins."""
    interval: Annotated[int, Meta(ge=1)] = 1
    """Publish every so many training steps."""
    deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest any one stage may take, in seconds. With `drain` the swap takes as long as the longest request."""

    def check(self) -> None:
        if self.schedule == "blocking" and self.interrupt == "drain":
            raise ConfigError(
                'sync.interrupt = "drain" waits for requests to end; sync.schedule = "blocking" lets none go on',
                "drain",
                'use sync.schedule = "never_stop"',
            )
