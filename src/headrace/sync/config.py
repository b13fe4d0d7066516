"""Configuration of weight sync. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError


class SyncConfig(Config):
    """How a version travels from the trainer to the engines: payload × transport × schedule."""

    payload: Literal["full", "delta", "adapter"] | None = None
    """What travels. `full`: all weights. `delta`: the elements whose stored bits changed, losslessly. `adapter`:
    the LoRA adapter that `training.lora` trains, which engines apply to the weights they loaded. None: `adapter`
    where an adapter is trained, otherwise `full`."""
    transport: Literal["in_process", "shared_memory", "cuda_ipc", "collective", "files", "http"] = "shared_memory"
    """How. `in_process` is for engine and trainer in one process (the library's primitives). `shared_memory`:
    processes of one machine. `cuda_ipc`: processes on one GPU, which the bytes then do not leave. `collective`:
    a broadcast in buckets. `files`: through a folder that all reach, in the formats of safetensors and PEFT.
    `http`: engines fetch them from the trainer."""
    folder: str | None = None
    """For `files`: where versions are, under the same path for the trainer and all engines. None: `weights` in the
    run's folder."""
    address: str = "127.0.0.1"
    """For `http` and `collective`: the address at which engines reach the trainer's machine."""
    schedule: Literal["never_stop", "blocking"] = "never_stop"
    """`never_stop`: swap between two forward passes while generation goes on. `blocking`: pause, then send."""
    interrupt: Literal["keep", "recompute", "resume", "retry", "drain"] = "keep"
    """What a swap does to running requests. `keep`: they go on, their keys and values as they are. `recompute`:
    they go on, and those are computed again. `resume`: they are aborted and go on from their tokens so far, which
    an environment does not notice. `retry`: they begin again. `drain`: the swap waits until they have ended, and
    no new one begins."""
    interval: Annotated[int, Meta(ge=1)] = 1
    """Publish every so many training steps. A version that has not begun to be sent gives way to a later one."""
    min_interval_s: Annotated[float, Meta(ge=0)] = 0.0
    """Least seconds between the beginnings of two publications."""
    anchor_every: Annotated[int, Meta(ge=1)] = 50
    """For `delta`: every so many versions one is sent whole."""
    retries: Annotated[int, Meta(ge=0)] = 3
    """How often an engine that could not take a version is offered it again; from the second time on it is replaced
    first. Then the run ends with the reason."""
    check_served: bool = False
    """After each acknowledgement ask the engine for the checksums of the weights it serves and compare them with
    the version's; a difference ends the run. It costs the engine a read of all weights, beside generation."""
    deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    """Longest any one stage may take, in seconds. With `drain` the swap takes as long as the longest request."""

    def check(self) -> None:
        if self.folder is not None and self.transport != "files":
            raise ConfigError(
                'sync.folder belongs to sync.transport = "files"',
                f"{self.folder!r} with {self.transport!r}",
                "leave sync.folder out, or use that transport",
            )
        if self.transport in ("http", "collective") and self.address in ("", "0.0.0.0", "::"):
            raise ConfigError(
                "sync.address is one address, under which engines reach the trainer's machine",
                self.address,
                'give that address; on one machine leave it at "127.0.0.1"',
            )
        if self.schedule == "blocking" and self.interrupt == "drain":
            raise ConfigError(
                'sync.interrupt = "drain" waits for requests to end; sync.schedule = "blocking" lets none go on',
                "drain",
                'use sync.schedule = "never_stop"',
            )
