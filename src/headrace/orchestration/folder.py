"""A run's folder before the run: made or taken up again, held, and with the resolved configuration in it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.config.base import Config
from headrace.config.dump import dump_config
from headrace.config.load import read_config
from headrace.config.run import RunConfig
from headrace.errors import ConfigError, RunFolderError
from headrace.orchestration.gpu import has_bfloat16_gpu, may_have_gpu
from headrace.orchestration.vault import checkpointed_step
from headrace.telemetry.folder import RunFolder

MAY_CHANGE = ("training.steps", "evaluation", "limits", "recording", "name")
"""What a resumed run may set differently; everything else it keeps."""


def prepare(run: RunFolder, config: RunConfig, *, resume: bool, overwrite: bool) -> RunConfig:
    """The run's folder, held by this process, with the resolved configuration in it, which is returned."""
    check_devices(config)
    if resume:
        if not run.exists():
            raise RunFolderError(
                "--resume continues a run that has begun, and this folder holds none",
                str(run.path),
                "leave --resume out to begin one, or name the run's folder with --run DIR",
            )
        if not run.ledger.is_file():
            raise RunFolderError(
                "a run is resumed with its ledger, and this one has lost it",
                str(run.ledger),
                "restore the file, or begin a new run",
            )
        stored = read_config(run.config)
        config = resolved(config, stored)
        refuse_other_run(stored, config)
        refuse_fewer_steps(run, config)
    else:
        config = resolved(config)
        run.make(overwrite=overwrite)
    run.hold()
    run.config.write_text(dump_config(config), encoding="utf-8")
    return config


def check_devices(config: RunConfig) -> None:
    """Raise ConfigError where a GPU is asked for and there is none."""
    for setting, asked in (
        ('engine.device = "cuda"', config.engine.device == "cuda"),
        ('training.device = "cuda"', config.training.device == "cuda"),
        ('sync.transport = "cuda_ipc"', config.sync.transport == "cuda_ipc"),
    ):
        if asked and not may_have_gpu():
            raise ConfigError(
                f"{setting} needs a GPU, and the driver finds none",
                remedy="leave it out, or look at what `headrace doctor` finds",
            )


def resolved(config: RunConfig, stored: RunConfig | None = None) -> RunConfig:
    """With the dtypes that are left to the machine: those of the run that is resumed, or what suits the devices."""
    engine, training = config.engine, config.training
    if engine.dtype == "auto":
        found = _dtype_on(engine.device) if stored is None else stored.engine.dtype
        engine = msgspec.structs.replace(engine, dtype=found)
    if training.dtype == "auto":
        found = _dtype_on(training.device) if stored is None else stored.training.dtype
        training = msgspec.structs.replace(training, dtype=found)
    return msgspec.structs.replace(config, engine=engine, training=training)


def _dtype_on(device: str) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if device != "cpu" and has_bfloat16_gpu() else "float32"


def refuse_other_run(stored: RunConfig, given: RunConfig) -> None:
    """A resumed run keeps its configuration, apart from `MAY_CHANGE`."""
    changed = [
        (key, before, after)
        for key, before, after in differences(stored, given)
        if not any(key == free or key.startswith(free + ".") for free in MAY_CHANGE)
    ]
    if changed:
        raise ConfigError(
            f"a resumed run keeps its configuration, apart from {', '.join(MAY_CHANGE)}",
            ", ".join(f"{key}: {before!r} became {after!r}" for key, before, after in changed),
            "restore these values, or begin a new run with --run DIR",
        )


def refuse_fewer_steps(run: RunFolder, config: RunConfig) -> None:
    """A resumed run ends where it is, or later."""
    done = checkpointed_step(run.path)
    if config.training.steps < done:
        raise ConfigError(
            f"a resumed run goes on, and this one has done {done} steps",
            f"training.steps = {config.training.steps}",
            "leave training.steps as it was, or raise it",
        )


def differences(one: Config, other: Config, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values."""
    found: list[tuple[str, Any, Any]] = []
    for name in one.__struct_fields__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, Config) and type(left) is type(right):
            found += differences(left, right, f"{prefix}{name}.")
        elif left != right:
            found.append((prefix + name, left, right))
    return found
