"""bench e2e: its arithmetic by hand, and whole at a size that a CPU runs in seconds."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.e2e import TINY, ideal_rate, row_of, run
from headrace.bench.window import Window, window
from headrace.cli.bench import BENCHMARKS
from headrace.errors import ConfigError


def line(step: int, **more: Any) -> dict[str, Any]:
    spent = {f"{who}_{state}_s": 0.0 for who in ("engine", "trainer") for state in ("busy", "idle", "overhead")}
    return {"time_s": 10.0 * step, "tokens_trained": step, "staleness_mean": 0.5, "staleness_max": 1} | spent | more


def test_a_window_is_what_lies_between_the_first_and_the_last_steps() -> None:
    lines = [line(step, engine_busy_s=4.0 * step, trainer_idle_s=2.0 * step) for step in range(1, 7)]
    lines[3] |= {"staleness_mean": 1.5, "staleness_max": 4}
    lines[5] |= {"staleness_max": 9}
    seen = window(lines, 2, 1)
    assert (seen.steps, seen.wall_s, seen.tokens) == (3, 30.0, 3 + 4 + 5)
    assert seen.tokens_per_s == 12 / 30
    assert seen.engine == {"busy": 12.0, "idle": 0.0, "overhead": 0.0}
    assert seen.trainer == {"busy": 0.0, "idle": 6.0, "overhead": 0.0}
    assert (seen.staleness_mean, seen.staleness_max) == (2.5 / 3, 4)


def test_a_device_that_does_both_is_as_fast_as_their_times_together_allow() -> None:
    assert ideal_rate(300.0, 600.0) == pytest.approx(200.0)


def test_a_synchronous_run_is_allowed_to_gain_its_tail_and_its_waits() -> None:
    busy = {"idle": 0.0, "overhead": 0.0}
    seen = Window(2, 20.0, 1000, {"busy": 12.0, **busy}, {"busy": 5.0, **busy}, 0.0, 0)
    row = row_of("synchronous", 8, seen, engine_rate=200.0, ideal=100.0)
    # At full speed 1,000 tokens take 5 s of the 12; for 3 s nobody worked.
    assert (row["tail_s"], row["waiting_s"]) == (3.5, 1.5)
    assert row["gain_allowed"] == 20.0 / (5.0 + 5.0)
    assert (row["trained_tokens_per_s"], row["over_ideal"], row["step_s"]) == (50.0, 0.5, 10.0)
    assert "gain_allowed" not in row_of("asynchronous", 8, seen, 200.0, 100.0)


def test_the_asynchronous_run_is_set_beside_what_each_side_reaches_alone() -> None:
    found = run(parts="async", device="cpu")
    alone, asynchronous = found["rows"]
    assert BENCHMARKS["e2e"] == "headrace.bench.e2e:run"
    assert alone["ideal_tokens_per_s"] == ideal_rate(alone["engine_tokens_per_s"], alone["trainer_tokens_per_s"])
    assert found["figures"] == {"e2e_over_ideal": asynchronous["over_ideal"]}
    assert asynchronous["groups"] == TINY.groups
    assert asynchronous["trained_tokens_per_s"] / alone["ideal_tokens_per_s"] == asynchronous["over_ideal"] > 0


@pytest.mark.full
def test_the_gain_is_set_beside_what_the_best_synchronous_run_allows() -> None:
    found = run(device="cpu")
    _, *synchronous, asynchronous = found["rows"]
    assert [row["groups"] for row in synchronous] == list(TINY.sync_groups)
    best = max(synchronous, key=lambda row: row["trained_tokens_per_s"])
    gain = asynchronous["trained_tokens_per_s"] / best["trained_tokens_per_s"]
    assert found["figures"]["async_over_sync_cpu"] == gain
    assert found["figures"]["async_gain_over_allowed"] == gain / best["gain_allowed"]


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: async, sync"):
        run(parts="both")
