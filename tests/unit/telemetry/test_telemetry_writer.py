"""Telemetry writes everything in order, never blocks, and survives a disk that does not work."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from batch_builders import make_batch, metric_line

from headrace.telemetry.config import RecordingConfig
from headrace.telemetry.episodes import is_kept, read_episodes
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.metrics import METRIC_KEYS
from headrace.telemetry.writer import FolderTelemetry


def close(telemetry: FolderTelemetry) -> None:
    asyncio.run(telemetry.close())


def test_metrics_events_and_episodes_are_on_disk_after_close(tmp_path: Path) -> None:
    telemetry = FolderTelemetry(tmp_path, decode=lambda ids: "x" * len(ids), clock=lambda: 100.0)
    for step in (1, 2, 3):
        telemetry.batch(make_batch(step=step), produced=step)
        telemetry.step(metric_line(step, reward_mean=step / 10))
    telemetry.event("evaluated", step=3, pass_1=0.75)
    close(telemetry)
    run = RunFolder(tmp_path)
    lines = run.read_metrics()
    assert [line["reward_mean"] for line in lines] == [0.1, 0.2, 0.3]
    assert set(lines[0]) == set(METRIC_KEYS)
    assert run.read_events("evaluated") == [{"kind": "evaluated", "time": 100.0, "step": 3, "pass_1": 0.75}]
    assert [one.step for one in read_episodes(run)] == [1] * 4 + [2] * 4 + [3] * 4
    assert not telemetry.failures


def test_the_event_file_says_what_was_recorded_of_what_was_trained(tmp_path: Path) -> None:
    telemetry = FolderTelemetry(tmp_path, RecordingConfig(episodes=0.5, tensorboard=False))
    batches = [make_batch(step=step, groups=8) for step in range(4)]
    for batch in batches:
        telemetry.batch(batch, produced=batch.step + 1)
    close(telemetry)
    expected = [group.id for batch in batches for group in batch.groups if is_kept(group.id, 0.5)]
    assert 0 < len(expected) < 32
    assert list(dict.fromkeys(one.group for one in read_episodes(tmp_path))) == expected
    run = RunFolder(tmp_path)
    assert run.read_events("recording")[0]["fraction_of_groups"] == 0.5
    recorded = run.read_events("recorded")[0]
    assert (recorded["groups_trained"], recorded["groups_written"]) == (32, len(expected))
    assert (recorded["episodes_trained"], recorded["episodes_written"]) == (64, 2 * len(expected))


def test_a_number_that_json_lacks_becomes_null_and_the_line_stays_valid(tmp_path: Path) -> None:
    telemetry = FolderTelemetry(tmp_path, RecordingConfig(tensorboard=True))
    telemetry.step(metric_line(1, loss=float("nan"), kl=float("inf")))
    close(telemetry)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["kl"], line["entropy"]) == (None, None, 0.5)


def test_an_unwritable_folder_costs_the_files_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    seen: list[Any] = []

    class Watcher:
        def step(self, line: dict[str, Any]) -> None:
            seen.append(line["step"])

        def event(self, kind: str, fields: dict[str, Any]) -> None:
            pass

        def close(self) -> None:
            seen.append("closed")

    telemetry = FolderTelemetry(blocked, watcher=Watcher())
    for step in (1, 2):
        telemetry.step(metric_line(step))
        telemetry.batch(make_batch(step=step), produced=step)
    close(telemetry)
    assert seen == [1, 2, "closed"]
    assert telemetry.failures == {"events.jsonl": 2, "metrics.jsonl": 2, "tensorboard": 2, "episodes": 2}
    assert isinstance(telemetry.first_error["metrics.jsonl"], OSError)
    warnings = capfd.readouterr().err
    assert warnings.count("telemetry cannot write metrics.jsonl, training goes on") == 1
    assert "telemetry could not write everything" in warnings


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = FolderTelemetry(tmp_path, RecordingConfig(tensorboard=False))
    real_write, full = os.write, threading.Event()

    def write(file: int, data: bytes) -> int:
        if full.is_set() and b'"step":2,' in data:
            real_write(file, data[:10])
            raise OSError(28, "No space left on device")
        return real_write(file, data)

    monkeypatch.setattr("headrace.telemetry.lines.os.write", write)
    full.set()
    for step in (1, 2, 3):
        telemetry.step(metric_line(step))
    close(telemetry)
    assert [line["step"] for line in RunFolder(tmp_path).read_metrics()] == [1, 3]
    assert telemetry.failures == {"metrics.jsonl": 1}


def test_callers_never_wait_and_what_piles_up_is_left_out_by_name(tmp_path: Path) -> None:
    gate = threading.Event()

    def stuck(ids: list[int]) -> str:
        gate.wait(10)
        return ""

    telemetry = FolderTelemetry(tmp_path, decode=stuck, pending_limit=1)
    began = time.monotonic()
    for step in range(3):
        telemetry.batch(make_batch(step=step + 1), produced=step + 1)
        telemetry.step(metric_line(step + 1))
    assert time.monotonic() - began < 5, "they would have waited for ten seconds"
    gate.set()
    close(telemetry)
    run = RunFolder(tmp_path)
    assert [number for number, _ in run.step_files()] == [1]
    left_out = run.read_events("episodes_not_recorded")
    assert [(event["step"], event["groups"]) for event in left_out] == [(2, 2), (3, 2)]
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3]


def test_text_that_cannot_be_decoded_does_not_cost_the_episode(tmp_path: Path) -> None:
    def broken(ids: list[int]) -> str:
        raise RuntimeError("no such token")

    telemetry = FolderTelemetry(tmp_path, decode=broken)
    telemetry.batch(make_batch(step=0, groups=1, size=1), produced=1)
    close(telemetry)
    assert [one.episode.id for one in read_episodes(tmp_path)] == ["g0/0"]
    assert telemetry.failures == {"text of episodes": 2}


def test_a_line_cut_short_by_a_crash_is_not_joined_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    assert [line["step"] for line in RunFolder(tmp_path).read_metrics()] == [1]
    telemetry = FolderTelemetry(tmp_path)
    telemetry.step({"step": 2})
    close(telemetry)
    assert RunFolder(tmp_path).read_metrics() == [{"step": 1}, {"step": 2}]


def test_tensorboard_reads_the_scalars_and_torch_is_never_loaded(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from batch_builders import metric_line
from headrace.telemetry.writer import FolderTelemetry
telemetry = FolderTelemetry({str(tmp_path)!r})
for step in (1, 2):
    telemetry.step(metric_line(step, reward_mean=step / 4))
telemetry.event("evaluated", step=2, pass_1=0.625, best=True)
asyncio.run(telemetry.close())
assert not telemetry.failures, telemetry.first_error
print([name for name in ("torch", "tensorflow", "transformers", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    rewards = [(scalar.step, scalar.value) for scalar in board.Scalars("train/reward_mean")]
    assert rewards == [(1, 0.25), (2, 0.5)]
    assert [scalar.value for scalar in board.Scalars("evaluation/pass_1")] == [0.625]
    assert "evaluation/best" not in board.Tags()["scalars"]


def test_tensorboard_has_users_metrics_every_set_and_some_episodes_as_text(tmp_path: Path) -> None:
    telemetry = FolderTelemetry(
        tmp_path, RecordingConfig(examples=3, examples_every=5), decode=lambda tokens: f"<b>{len(tokens)}\n- x"
    )
    for step in (1, 2, 6):
        telemetry.batch(make_batch(step=step), produced=step)
        telemetry.step({**metric_line(step), "user/right": 0.5})
    hard = {"pass_1": 0.5, "pass_at": {"1": 0.5, "4": 0.75}, "user": {"right": 0.25}}
    telemetry.event("evaluated", step=2, set="held_out", pass_1=0.625, user={"right": 0.75}, sets={"hard": hard})
    close(telemetry)
    assert not telemetry.failures, telemetry.first_error
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    names = ("train/user/right", "evaluation/user/right", "evaluation/hard/pass_at/4", "evaluation/hard/user/right")
    assert [board.Scalars(name)[-1].value for name in names] == [0.5, 0.75, 0.75, 0.25]
    assert board.SummaryMetadata("episodes").plugin_data.plugin_name == "text"
    shown = board.Tensors("episodes")
    assert [one.step for one in shown] == [1, 6]
    texts = [text.decode() for text in shown[0].tensor_proto.string_val]
    # Of two groups with rewards 0.1 and 0.2 each: the worst, one in between, the best.
    assert [text.split("\n")[0].split("reward ")[1].split(",")[0] for text in texts] == ["0.1", "0.2", "0.2"]
    assert "prompt\n\n    0+1=" in texts[0]
    assert "    <b>5\n    - x" in texts[0]
