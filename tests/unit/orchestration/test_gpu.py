"""What suits the machine is chosen without torch, once, and kept by a run that is resumed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.config.run import ModelConfig, RunConfig
from headrace.engine.config import NativeEngineConfig
from headrace.errors import ConfigError
from headrace.ledger import Ledger
from headrace.models import dtype_on
from headrace.orchestration import folder, gpu
from headrace.rollout.config import JsonlTasks
from headrace.sync.config import SyncConfig
from headrace.telemetry.folder import RunFolder
from headrace.training.checkpoint_state import write_state
from headrace.training.config import TrainingConfig


class Driver:
    """CUDA's, with one device."""

    def __init__(self, major: int, *, broken: str = ""):
        self._major, self._broken = major, broken

    def __getattr__(self, name: str):
        def call(*given) -> int:
            if name == "cuDeviceGetAttribute":
                given[0]._obj.value = self._major
            return 999 if name == self._broken else 0

        return call


@pytest.mark.parametrize(
    ("driver", "built_for_cuda", "has"),
    [
        (Driver(9), True, True),
        (Driver(8), True, True),
        (Driver(7), True, False),
        (Driver(9, broken="cuInit"), True, False),
        (Driver(9, broken="cuDeviceGet"), True, False),
        (Driver(9), False, False),
        (None, True, False),
    ],
)
def test_a_gpu_counts_if_torch_can_use_it_in_bfloat16(monkeypatch, driver, built_for_cuda, has) -> None:
    def library(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(gpu, "_torch_has_cuda", lambda: built_for_cuda)
    monkeypatch.setattr(gpu.sys, "platform", "linux")
    gpu._compute_capability.cache_clear()
    assert gpu.has_bfloat16_gpu() == has
    gpu._compute_capability.cache_clear()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"engine": NativeEngineConfig(device="cuda")}, "engine.device"),
        ({"training": TrainingConfig(device="cuda")}, "training.device"),
        ({"sync": SyncConfig(transport="cuda_ipc")}, "sync.transport"),
    ],
)
def test_a_gpu_that_is_not_there_is_missed_before_the_folder_is_touched(
    monkeypatch, tmp_path, settings, key
) -> None:
    given = msgspec.structs.replace(config(), **settings)
    monkeypatch.setattr(folder, "may_have_gpu", lambda: False)
    with pytest.raises(ConfigError, match=f"{key} = .* needs a GPU"):
        folder.prepare(RunFolder(tmp_path / "run"), given, resume=False, overwrite=True)
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(folder, "may_have_gpu", lambda: True)
    folder.check_devices(given)


def test_a_mac_has_no_gpu_that_cuda_runs_on(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gpu.sys, "platform", "darwin")
    given = config({"device": "cuda"})
    with pytest.raises(ConfigError, match=r"needs a GPU"):
        folder.prepare(RunFolder(tmp_path / "run"), given, resume=False, overwrite=False)


def test_a_resumed_run_does_not_end_before_where_it_is(tmp_path) -> None:
    run = RunFolder(tmp_path / "run")
    folder.prepare(run, config(), resume=False, overwrite=False)
    run.release()
    ledger = Ledger(run.ledger)
    ledger.recover(None, run.config.read_text())
    ledger.apply([("INSERT INTO versions (number, step, session) VALUES (?, ?, ?)", (6, 6, 1))])
    ledger.close()
    (run.checkpoints / "step-000006").mkdir(parents=True)
    write_state(run.checkpoints / "step-000006", {"step": 6, "version": 6, "state": {"step": 6, "version": 6}})
    before = run.config.read_text()
    with pytest.raises(ConfigError, match="has done 6 steps"):
        folder.prepare(run, config(training={"steps": 3}), resume=True, overwrite=False)
    assert run.config.read_text() == before
    assert folder.prepare(run, config(training={"steps": 6}), resume=True, overwrite=False).training.steps == 6
    run.release()


def config(engine: dict | None = None, training: dict | None = None) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path="model"),
        tasks=JsonlTasks(path="tasks.jsonl"),
        engine=NativeEngineConfig(**(engine or {})),
        training=TrainingConfig(**(training or {})),
    )


def dtypes(given: RunConfig) -> tuple[str, str]:
    return given.engine.dtype, given.training.dtype


def test_what_is_left_to_the_machine_is_bfloat16_where_there_is_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(folder, "has_bfloat16_gpu", lambda: True)
    assert dtypes(folder.resolved(config())) == ("bfloat16", "bfloat16")
    assert dtypes(folder.resolved(config({"device": "cpu"}))) == ("float32", "bfloat16")
    assert dtypes(folder.resolved(config({"dtype": "float32"}, {"device": "cpu"}))) == ("float32", "float32")
    monkeypatch.setattr(folder, "has_bfloat16_gpu", lambda: False)
    assert dtypes(folder.resolved(config())) == ("float32", "float32")
    assert dtypes(folder.resolved(config({"dtype": "bfloat16"}))) == ("bfloat16", "float32")


def test_a_resumed_run_keeps_the_dtypes_it_began_with(monkeypatch) -> None:
    monkeypatch.setattr(folder, "has_bfloat16_gpu", lambda: False)
    stored = folder.resolved(config())
    monkeypatch.setattr(folder, "has_bfloat16_gpu", lambda: True)
    assert folder.resolved(config(), stored) == stored
    given = config(training={"dtype": "bfloat16"})
    changed = msgspec.structs.replace(stored, training=given.training)
    assert folder.resolved(given, stored) == changed


def test_the_folder_says_what_was_chosen(tmp_path: Path) -> None:
    place = folder.RunFolder(tmp_path / "run")
    ran = folder.prepare(place, config(), resume=False, overwrite=False)
    place.release()
    assert "auto" not in dtypes(ran)
    assert dtypes(folder.read_config(place.config)) == dtypes(ran)


def test_auto_is_float32_on_a_cpu() -> None:
    assert dtype_on("cpu", "auto") == torch.float32
    assert dtype_on("cpu", "bfloat16") == torch.bfloat16
