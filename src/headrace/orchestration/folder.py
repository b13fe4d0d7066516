"""A run's folder before the run: made or taken up again, held, and with the resolved configuration in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.config.changes import MAY_CHANGE, edited, forbidden_changes
from headrace.config.dump import dump_config, dump_toml
from headrace.config.load import config_of_table, config_of_text, read_config, table_of
from headrace.config.run import RunConfig
from headrace.errors import ConfigError, InputError, RunFolderError
from headrace.ledger import Ledger
from headrace.orchestration.gpu import has_bfloat16_gpu, may_have_gpu
from headrace.orchestration.machine import this_machine
from headrace.orchestration.planning import plan_of
from headrace.orchestration.resuming import inspect_run
from headrace.orchestration.vault import FolderVault
from headrace.telemetry.folder import RunFolder


def prepare(
    run: RunFolder,
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    from_step: int | None = None,
    file: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The resolved configuration; the run's folder is held by this process. A new run's folder has it at once.

    A run that is resumed is looked at first (`from_step` as in `inspect_run`). What its folder has stays as it is
    until the session has begun (`settle`): the run may have finished, and this session may never begin. `file` has
    the tables of the configuration file, where there is one: by them a later `--resume` sees what was edited since.
    """
    check_devices(config)
    if from_step is not None and not resume:
        raise ConfigError("--from chooses what --resume goes on from", from_step, "give --resume too")
    if resume and overwrite:
        raise RunFolderError("a run is resumed or overwritten, not both", "--resume --overwrite", "leave one out")
    if not resume:
        config = _planned(resolved(config), run)
        run.make(overwrite=overwrite)
    else:
        _refuse_nothing(run)
    run.hold()
    try:
        if resume:
            config = _take_up(run, config, from_step)
            run.given_next.unlink(missing_ok=True)
        else:
            write_whole(run.config, dump_config(config))
        if file is not None:
            write_whole(run.given_next if resume else run.given, dump_toml(file))
    except BaseException:
        run.release()
        raise
    return config


def settle(run: RunFolder, config: RunConfig) -> None:
    """A session has begun: its configuration is the run's from now on."""
    write_whole(run.config, dump_config(config))
    if run.given_next.is_file():
        run.given_next.replace(run.given)


def _refuse_nothing(run: RunFolder) -> None:
    if not run.exists():
        raise RunFolderError(
            "--resume continues a run that has begun, and this folder holds none",
            str(run.path),
            "leave --resume out to begin one, or name the run's folder with --run DIR",
        )


def config_to_resume(
    run: RunFolder,
    table: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    where: str = "",
    *,
    before: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The run's own configuration under `overrides`. Over it comes what in `table`, which stands `where`, is not as
    it was `before`. Whether a run may change so, `prepare` judges."""
    _refuse_nothing(run)
    stored = table_of(stored_config(run))
    if table is not None:
        stored = edited(stored, before or {}, table)
    return config_of_table(stored, overrides, where or str(run.config))


@contextmanager
def in_folder(run: RunFolder, *, resume: bool) -> Iterator[None]:
    """While a prepared run executes. Its folder is released; where input was refused at the start, it is undone."""
    try:
        yield
    except InputError:
        # The ledger is opened when all parts have started.
        if not resume and not run.ledger.exists():
            with suppress(OSError):
                run.unmake()
        raise
    finally:
        run.release()


def _take_up(run: RunFolder, config: RunConfig, from_step: int | None) -> RunConfig:
    vault = FolderVault(run.path, keep=config.training.keep_checkpoints)
    standing = inspect_run(run, group_size=config.training.group_size, from_step=from_step)
    stored = stored_config(run)
    config = _planned(resolved(config, stored), run)
    refuse_other_run(_as_stored(stored, config), config)
    step = vault.step_of(standing.checkpoint)
    if config.training.steps < step:
        raise ConfigError(
            f"a resumed run goes on, and this one has done {step} steps",
            f"training.steps = {config.training.steps}",
            "leave training.steps as it was, or raise it",
        )
    return config


def stored_config(run: RunFolder) -> RunConfig:
    """As the last session began with it. The ledger has it; config.toml is for people to read."""
    if run.ledger.is_file():
        try:
            ledger = Ledger(run.ledger, read_only=True)
        except RunFolderError:
            # `inspect_run` has found that nothing had happened yet.
            return read_config(run.config)
        found = ledger.query("SELECT config FROM sessions WHERE config <> '' ORDER BY number DESC LIMIT 1")
        ledger.close()
        if found:
            return config_of_text(found[0][0], f"{run.ledger}, the configuration of its last session")
    return read_config(run.config)


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
                remedy='leave it out ("auto" takes what there is), or look at what `headrace doctor` finds',
            )


def resolved(config: RunConfig, stored: RunConfig | None = None) -> RunConfig:
    """With the dtypes that are left to the machine: those of the run that is resumed, or what suits the devices.
    What the memory plan chose for that run is kept too."""
    if stored is not None:
        config = _as_stored(config, stored)
    engine, training = config.engine, config.training
    if engine.dtype == "auto":
        found = _dtype_on(engine.device) if stored is None else stored.engine.dtype
        engine = msgspec.structs.replace(engine, dtype=found)
    if training.dtype == "auto":
        found = _dtype_on(training.device) if stored is None else stored.training.dtype
        training = msgspec.structs.replace(training, dtype=found)
    return msgspec.structs.replace(config, engine=engine, training=training)


def _planned(config: RunConfig, run: RunFolder) -> RunConfig:
    """With what the memory plan chooses of what is left open. ConfigError where the run does not fit."""
    plan = plan_of(config, run.path, this_machine(run.path, own_files=True))
    if plan is None:
        return config
    plan.check()
    return plan.config


def _as_stored(config: RunConfig, stored: RunConfig) -> RunConfig:
    """What the configuration leaves to the memory plan is what it was when the run began."""

    def kept(given: Any, before: Any, keys: Sequence[str]) -> Any:
        open_keys = [key for key in keys if getattr(given, key) is None]
        return msgspec.structs.replace(given, **{key: getattr(before, key) for key in open_keys})

    config = kept(config, stored, ["placement"])
    return msgspec.structs.replace(
        config,
        training=kept(config.training, stored.training, ["micro_batch_tokens", "recompute"]),
        engine=kept(config.engine, stored.engine, ["standby", "cache_tokens"]),
    )


def _dtype_on(device: str) -> Literal["float32", "bfloat16"]:
    return "bfloat16" if device != "cpu" and has_bfloat16_gpu() else "float32"


def refuse_other_run(stored: RunConfig, given: RunConfig) -> None:
    """A resumed run keeps its configuration, apart from `MAY_CHANGE`."""
    if changed := forbidden_changes(stored, given):
        raise ConfigError(
            f"a resumed run keeps its configuration, apart from {', '.join(MAY_CHANGE)}",
            ", ".join(f"{key}: {before!r} became {after!r}" for key, before, after in changed),
            "restore these values, or begin a new run with --run DIR",
        )


def write_whole(file: Path, text: str) -> None:
    """The file has the text, or what it had before."""
    partial = file.with_name(file.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise RunFolderError(
            f"a run's folder can be written: {error}",
            str(file),
            "look at the disk's free space and the folder's permissions",
        ) from error
