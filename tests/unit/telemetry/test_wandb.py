"""Weights & Biases, by the real package in its offline mode: what arrives in its own file."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_builders import make_batch, metric_line

from headrace.telemetry.config import RecordingConfig, WandbConfig
from headrace.telemetry.wandb_tracker import WandbTracker
from headrace.telemetry.writer import FolderTelemetry


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format behind a header of seven bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]


def test_metrics_evaluations_and_examples_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recording = RecordingConfig(wandb=WandbConfig(mode="offline", project="mine"), examples=2, tensorboard=False)

    async def run() -> None:
        telemetry = FolderTelemetry(
            tmp_path / "demo", recording, decode=lambda tokens: f"said {len(tokens)}", settings={"seed": 7}
        )
        batch = make_batch(step=1)
        telemetry.batch(batch, produced=1)
        telemetry.step({**metric_line(1, reward_mean=0.25), "user/right": 0.5, "failed_frac": None})
        telemetry.event("evaluated", step=1, set="held_out", pass_1=0.75, valid=True, user={"right": 0.5})
        await telemetry.close()

    asyncio.run(run())
    lines = history(tmp_path / "demo")
    [train] = [line for line in lines if "train/reward_mean" in line]
    assert (train["step"], train["train/reward_mean"], train["train/user/right"]) == (1, 0.25, 0.5)
    assert "train/failed_frac" not in train
    [evaluation] = [line for line in lines if "evaluation/pass_1" in line]
    assert (evaluation["evaluation/pass_1"], evaluation["evaluation/user/right"]) == (0.75, 0.5)
    [shown] = [line for line in lines if "episodes/path" in line or "episodes" in line]
    [table] = (tmp_path / "demo").glob("wandb/offline-run-*/files/media/table/episodes*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:4] == ["step", "episode", "reward", "advantage"]
    assert len(content["data"]) == 2
    assert content["data"][0][content["columns"].index("completion")].startswith("said ")
    assert shown["step"] == 1


def test_a_run_without_credentials_goes_on_and_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    tracker = WandbTracker(tmp_path, WandbConfig(), {})
    tracker.step({"step": 1, "loss": 0.5})
    tracker.close(60.0)
    assert "needs wandb's credentials" in str(tracker.failure)
    assert "training goes on" in capsys.readouterr().err
    tracker.step({"step": 2, "loss": 0.5})
