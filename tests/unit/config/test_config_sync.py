"""Payload × transport × schedule: combinations that cannot work are refused when the configuration is read."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from headrace.config.load import read_config
from headrace.errors import ConfigError

PAYLOADS = (None, "full", "delta", "adapter")
TRANSPORTS = ("in_process", "shared_memory", "cuda_ipc", "collective", "files", "http")
SCHEDULES = ("never_stop", "blocking")
INTERRUPTS = ("keep", "recompute", "resume", "retry", "drain")
DEVICES = ("auto", "cpu", "cuda")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('model.path = "m"\ntasks = { type = "jsonl", path = "t" }\n')
    return path


def refusal(file: Path, *overrides: str) -> str | None:
    try:
        read_config(file, overrides)
    except ConfigError as error:
        return str(error)
    return None


def test_of_all_combinations_just_those_that_cannot_work_are_refused(file: Path):
    refused, read = 0, 0
    for payload, lora, transport, schedule, interrupt, device in product(
        PAYLOADS, (False, True), TRANSPORTS, SCHEDULES, INTERRUPTS, DEVICES
    ):
        rules = []
        if transport == "in_process":
            rules.append("one process")
        if transport == "cuda_ipc" and device == "cpu":
            rules.append("within a GPU")
        if payload == "adapter" and not lora:
            rules.append("training.lora, and there is none")
        if payload in ("full", "delta") and lora:
            rules.append("only the adapter changes")
        if (schedule, interrupt) == ("blocking", "drain"):
            rules.append("lets none go on")
        error = refusal(
            file,
            *([f"sync.payload={payload}"] if payload else []),
            *(["training.lora={rank = 4}"] if lora else []),
            f"sync.transport={transport}",
            f"sync.schedule={schedule}",
            f"sync.interrupt={interrupt}",
            f"engine.device={device}",
        )
        here = payload, lora, transport, schedule, interrupt, device
        if rules:
            assert error is not None, here
            assert any(rule in error for rule in rules), here
            refused += 1
        else:
            assert error is None, here
            read += 1
    # (3 payloads without an adapter + 2 with) × (5 transports × 3 devices - 1) × 9 schedules, of 1,440.
    assert (read, refused) == (5 * 14 * 9, 810)


@pytest.mark.parametrize("key", ["engine.device", "training.device"])
def test_cuda_ipc_needs_both_sides_on_a_gpu(file: Path, key: str):
    error = refusal(file, "sync.transport=cuda_ipc", f"{key}=cpu")
    assert error == (
        f"sync.transport = \"cuda_ipc\" passes weights on within a GPU, and {key} is one (got 'cpu'); "
        f'set {key} = "cuda", or sync.transport = "shared_memory"'
    )


def test_engines_that_sleep_until_a_version_comes_are_not_kept_waiting_for_it(file: Path):
    assert refusal(file, "placement=turns", "sync.interval=3") is None
    assert refusal(file, "placement=side_by_side", "sync.min_interval_s=5") is None
    assert refusal(file, "placement=turns", "sync.min_interval_s=5") == (
        'placement = "turns" publishes while engines sleep, and sync.min_interval_s would keep them asleep '
        "(got 5.0); use sync.interval, which counts steps, or leave sync.min_interval_s out"
    )


def test_an_engine_s_place_is_waited_for_until_the_trainer_s_turn_has_ended(file: Path):
    limits = ("limits.start_s=10", "sync.deadline_s=5", "limits.step_s=100")
    beside, turns = (read_config(file, [*limits, f"placement={how}"]) for how in ("side_by_side", "turns"))
    assert (beside.revive_s, turns.revive_s) == (30.0, 130.0)
    assert (beside.takes_turns, turns.takes_turns) == (False, True)
    assert read_config(file, ["buffer.type=none"]).takes_turns


def test_an_option_of_another_transport_is_refused(file: Path):
    assert refusal(file, "sync.transport=files", "sync.folder=w") is None
    error = refusal(file, "sync.transport=http", "sync.folder=w")
    assert error is not None
    assert 'sync.folder belongs to sync.transport = "files"' in error


@pytest.mark.parametrize("transport", ["http", "collective"])
@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_is_one_that_engines_can_call(file: Path, transport: str, address: str):
    assert refusal(file, f"sync.transport={transport}", "sync.address=10.0.0.7") is None
    error = refusal(file, f"sync.transport={transport}", f'sync.address="{address}"')
    assert error is not None
    assert "sync.address is one address" in error
