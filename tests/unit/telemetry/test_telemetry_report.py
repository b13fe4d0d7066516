"""A finished run leaves a picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_builders import metric_line
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from headrace.errors import RunFolderError
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.report import (
    evaluated_sets,
    metric_name,
    picture_of,
    running_mean,
    shortened,
    write_report,
    write_report_apart,
)
from headrace.waits import ENGINE_CAUSES, TRAINER_CAUSES


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


# ── What is in the picture ───────────────────────────────────────────────────────────────────────────────


def with_causes(step: int, **changes: float) -> dict[str, float]:
    idle = {f"trainer_idle_{why}_frac": 0.0 for why in TRAINER_CAUSES}
    idle |= {f"engine_idle_{why}_frac": 0.0 for why in ENGINE_CAUSES}
    return metric_line(step, **idle) | changes


def drawn(folder: Path, lines: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Figure:
    write_run(folder, 5)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    figure = picture_of(RunFolder(folder))
    figure.draw_without_rendering()
    return figure


def title_of(figure: Figure) -> str:
    assert figure._suptitle is not None  # type: ignore[attr-defined]
    return str(figure._suptitle.get_text())  # type: ignore[attr-defined]


def titles(figure: Figure) -> list[str]:
    return [text for axis in figure.axes if (text := axis.get_title(loc="left"))]


def test_the_title_has_the_time_that_the_summary_has(tmp_path: Path) -> None:
    lines = [with_causes(step) for step in range(1, 6)]
    assert title_of(drawn(tmp_path / "a", lines)).startswith("a: 5 steps so far   ·   accuracy 10.0% → 15.0%")
    summary = {"steps": 5, "first_step": 0, "seconds": 55.34}
    assert title_of(drawn(tmp_path / "b", lines, summary)).startswith("b: 5 steps in 55.3 s")
    summary = {"steps": 5, "first_step": 3, "seconds": 7200}
    assert title_of(drawn(tmp_path / "c", lines, summary)).startswith("c: 5 steps, of which 2 in 2h 00m")
    # Of a session before: another has gone on since.
    summary = {"steps": 3, "first_step": 0, "seconds": 9}
    assert title_of(drawn(tmp_path / "d", lines, summary)).startswith("d: 5 steps so far")


def test_no_title_and_no_legend_covers_another(tmp_path: Path) -> None:
    users = {f"user/{name}": 0.5 for name in ("a", "b" * 80, "$c$")}
    shares = {
        "trainer_idle_scoring_frac": 0.2,
        "trainer_idle_generation_frac": 0.2,
        "engine_idle_training_frac": 0.3,
    }
    lines = [with_causes(step, **shares) | users for step in range(1, 50)]
    figure = drawn(tmp_path / ("name" * 40), lines)
    boxes: list[tuple[str, Bbox]] = [(title_of(figure), figure._suptitle.get_window_extent())]  # type: ignore[attr-defined]
    for axis in figure.axes:
        if text := axis.get_title(loc="left"):
            boxes.append((text, axis._left_title.get_window_extent()))  # type: ignore[attr-defined]
        if (legend := axis.get_legend()) is not None:
            boxes += [(entry.get_text(), entry.get_window_extent()) for entry in legend.get_texts()]
        boxes.append((f"the axes of {text}", axis.get_window_extent().shrunk(0.98, 0.98)))
    beside = {name for name, _ in boxes if name.startswith("the axes of ")}
    for place, (name, box) in enumerate(boxes):
        for other, another in boxes[:place]:
            # Two axes with one x axis are one on the other.
            assert {name, other} <= beside or not box.overlaps(another), (name, other)
    assert boxes[0][1].x1 < figure.bbox.x1


def test_idle_time_is_stacked_by_cause_and_causes_that_hardly_occur_are_left_out(tmp_path: Path) -> None:
    shares = {"trainer_idle_frac": 0.5, "trainer_idle_scoring_frac": 0.3, "trainer_idle_generation_frac": 0.2}
    shares |= {"trainer_idle_turns_frac": 0.004, "engine_idle_frac": 0.25, "engine_idle_training_frac": 0.25}
    figure = drawn(tmp_path / "run", [with_causes(step, **shares) for step in range(1, 4)])
    found = {axis.get_title(loc="left"): axis for axis in figure.axes}
    trainer, engines = found["Trainer idle 50%, waiting for"], found["Engines idle 25%, waiting for"]
    assert [text.get_text() for text in trainer.get_legend().get_texts()] == ["scoring", "generation"]
    assert [text.get_text() for text in engines.get_legend().get_texts()] == ["trainer's step"]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in trainer.collections]
    assert tops == pytest.approx([0.2, 0.5])


def test_a_run_that_did_not_note_the_causes_shows_idle_time_alone(tmp_path: Path) -> None:
    figure = drawn(tmp_path / "run", [metric_line(step) for step in range(1, 4)])
    assert {"Trainer idle 50%", "Engines idle 50%"} <= set(titles(figure))


def test_users_metrics_have_panels_of_their_own_up_to_a_number_and_the_rest_is_counted(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [with_causes(step) for step in range(1, 4)]
    lines[1]["user/tool_calls"] = 2.5
    figure = drawn(tmp_path / "few", lines)
    [axis] = [axis for axis in figure.axes if axis.get_title(loc="left") == "tool_calls"]
    assert np.nanmax(axis.lines[-1].get_ydata()) == 2.5
    lines = [line | {f"user/m{number:02}": 1.0 for number in range(20)} for line in lines]
    figure = drawn(tmp_path / "many", lines)
    assert [title for title in titles(figure) if title.startswith("m0")] == [f"m{n:02}" for n in range(9)]
    assert "tool_calls" not in titles(figure)
    assert figure._supxlabel.get_text() == "and 12 more metrics of users in metrics.jsonl"  # type: ignore[attr-defined]


def test_one_step_has_one_mark_on_its_axis(tmp_path: Path) -> None:
    lines = [with_causes(7)]
    folder = tmp_path / "run"
    write_run(folder, 5)
    (folder / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    (folder / "events.jsonl").unlink()
    figure = picture_of(RunFolder(folder))
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["7"]


def test_small_values_have_ticks_that_are_not_rounded(tmp_path: Path) -> None:
    figure = drawn(tmp_path / "run", [with_causes(1, drift_kl=0.00125, mismatch_kl=0.0)])
    [beside] = [axis for axis in figure.axes if "drift KL (right)" in axis.get_legend_handles_labels()[1]]
    for tick, text in zip(beside.get_yticks(), beside.get_yticklabels(), strict=True):
        assert float(text.get_text()) == pytest.approx(tick, rel=1e-6)


def test_evaluations_are_told_apart_by_set_and_called_what_they_are() -> None:
    events: list[dict[str, Any]] = [
        {
            "step": 0,
            "pass_1": 0.5,
            "set": "a",
            "sets": {"b": {"pass_1": -1.0}, "c": {"pass_1": 0.5, "valid": False}},
        },
        {"step": 5, "pass_1": None, "set": "a", "sets": {"b": {"pass_1": 2.0, "metric": "reward"}}},
        {"step": 9, "pass_1": 0.75},
    ]
    found = evaluated_sets(events)
    assert {name: [(one["step"], one["pass_1"]) for one in events] for name, events in found.items()} == {
        "a": [(0, 0.5)],
        "b": [(0, -1.0), (5, 2.0)],
        "held_out": [(9, 0.75)],
    }
    assert {name: metric_name(events) for name, events in found.items()} == {
        "a": "accuracy",
        "b": "reward",
        "held_out": "accuracy",
    }


def test_a_long_name_loses_its_middle() -> None:
    assert shortened("short", 5) == "short"
    assert shortened("0123456789", 7) == "012…789"
