"""Runs in which engines and trainer take turns, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_project import CONFIG, USER_CODE

from headrace import load_config, train
from headrace.audit import run_audit
from headrace.telemetry.episodes import read_episodes
from headrace.telemetry.folder import RunFolder

STEPS = 4


@pytest.mark.parametrize("buffer", ["none", "bounded"])
def test_engines_sleep_while_a_batch_is_trained(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch, buffer: str
):
    (tmp_path / "model").symlink_to(small_model)
    (tmp_path / "user.py").write_text(USER_CODE)
    (tmp_path / "config.toml").write_text(CONFIG.replace("max_staleness = 2\n", ""))
    monkeypatch.chdir(tmp_path)
    settings = {"placement": "turns", "buffer.type": buffer, "training.steps": STEPS}
    # Few at once and long ones, so that some still run when a batch is there, on a busy machine too.
    settings |= {"engine.max_running": 2, "environment.max_tokens": 24}
    held_out = {"every": 2, "limit": 8, "tasks": '{type="python", source="user.py:tasks"}'}
    settings |= {f"evaluation.{key}": value for key, value in held_out.items()}
    config = load_config("config.toml", [f"{key}={value}" for key, value in settings.items()])
    summary = train(config, folder=tmp_path / "run", progress=False)
    assert (summary["steps"], summary["finished"]) == (STEPS, True)
    assert [(line["step"], line["version"]) for line in summary["evaluations"]] == [(0, 0), (2, 2), (4, 4)]

    run = RunFolder(tmp_path / "run")
    turns = run.read_events("slept")
    assert [turn["step"] for turn in turns] == [1, 2, 3, 4]
    assert all(turn["engines"] == ["engine-0", "engine-eval"] for turn in turns)
    assert all("engine-0" not in turn["kept_weights"] for turn in turns), "each step's version is published"
    assert ["engine-0" in turn["woken"] for turn in turns] == [True, True, True, False]
    assert all(turn["asleep_s"] > 0 for turn in turns)
    assert [event["version"] for event in run.read_events("published")] == [0, 1, 2, 3, 4]
    assert run.read_events("sync_failed") == []
    slept = [
        any(event.cause == "sleep" for turn in stored.episode.turns for event in turn.lineage)
        for stored in read_episodes(tmp_path / "run")
    ]
    assert len(slept) == STEPS * 16
    assert any(slept) == (buffer == "bounded"), "in a synchronous run nothing is under way by then"
    found = run_audit(tmp_path / "run", recompute=10)
    assert found.violations == []
