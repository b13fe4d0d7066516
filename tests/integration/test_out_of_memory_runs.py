"""A run whose trainer and engine run out of memory now and then goes on, says so, and passes its audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from integration_project import CONFIG, USER_CODE

from headrace import load_config, train
from headrace.audit import run_audit
from headrace.orchestration.local import _Run
from headrace.telemetry.folder import RunFolder

STANDS_IN = {
    "headrace.training.remote:start": "starved_children:trainer",
    "headrace.engine.serve:start": "starved_children:engine",
}


def test_what_runs_out_of_memory_goes_on_and_the_audit_is_clean(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(small_model)
    (tmp_path / "user.py").write_text(USER_CODE)
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    plain = _Run._spawn

    async def starved(self: Any, name: str, entry: str, *rest: Any) -> Any:
        return await plain(self, name, STANDS_IN.get(entry, entry), *rest)

    monkeypatch.setattr(_Run, "_spawn", starved)
    summary = train(load_config("config.toml"), folder=tmp_path / "run", progress=False)
    assert (summary["steps"], summary["finished"]) == (12, True)

    run = RunFolder(tmp_path / "run")
    told = run.read_events("out_of_memory")
    assert [event["who"] for event in told].count("trainer") == 2
    assert [event["who"] for event in told].count("engine-0") == 3
    sizes = [event["cache_tokens"] for event in told if event["who"] == "engine-0"]
    assert sizes == sorted(sizes, reverse=True)
    assert run_audit(tmp_path / "run", recompute=20).violations == []

    memory = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    for who in ("trainer", "engine-0", "controller", "workers"):
        assert memory[who]["planned"]["host"] > 0
        assert memory[who]["measured"]["host"] > 0
    settled = run.config.read_text()
    assert 'placement = "side_by_side"' in settled
    assert "micro_batch_tokens = 16384" in settled
    assert "recompute = false" in settled
    assert "standby = true" in settled
