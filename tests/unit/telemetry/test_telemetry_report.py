"""A finished run leaves a picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from batch_builders import metric_line

from headrace.errors import RunFolderError
from headrace.telemetry.report import running_mean, write_report, write_report_apart


def write_run(folder: Path, steps: int) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text('[buffer]\ntype = "bounded"\nmax_staleness = 3\n')
    lines = [metric_line(step, reward_mean=step / steps, staleness_max=step % 3) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"kind": "evaluated", "time": 0, "step": step, "pass_1": 0.1 + step / 100} for step in (0, steps)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_the_report_is_a_picture_of_full_size(tmp_path: Path) -> None:
    picture = write_report(write_run(tmp_path / "run", 60))
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1540, 814)
    assert len(content) > 50_000


def test_a_run_of_one_step_with_holes_in_its_metrics_still_has_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward_mean": null}\n')
    assert write_report(folder).stat().st_size > 20_000


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


def test_drawn_apart_it_says_what_went_wrong_instead_of_raising(tmp_path: Path) -> None:
    assert write_report_apart(write_run(tmp_path / "run", 5)) is None
    assert (tmp_path / "run" / "report.png").is_file()
    assert "metrics.jsonl" in (write_report_apart(tmp_path / "nowhere") or "")


def test_the_running_mean_skips_what_is_not_a_number() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert running_mean(values, 1).tolist() == [1.0, 2.0, 4.0, 4.0]
    assert running_mean(values, 0)[[0, 2, 3]].tolist() == [1.0, 3.0, 5.0]


def test_a_report_whose_process_was_killed_in_silence_is_told_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nkill -TERM $$\n")
    silent.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(silent))
    assert write_report_apart(tmp_path) == "its process ended with status -15"
