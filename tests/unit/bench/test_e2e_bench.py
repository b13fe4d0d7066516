"""bench e2e: its arithmetic by hand, and whole at a size that a CPU runs in seconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headrace.bench.e2e import TINY, Alone, Load, figures_of, row_of, run, still_gains
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
    # For 3, 4 and 5 tokens of 2.5 s each, steps of 10 s took 2.5 s too long, as expected, and 2.5 s too few.
    assert seen.error_frac == pytest.approx(2.5 * 3**0.5 / 30)
    assert window(lines[:3], 2).error_frac == 0


def test_a_device_that_does_both_is_as_fast_as_their_times_together_allow() -> None:
    assert Alone(300.0, 600.0).ideal == pytest.approx(200.0)


def test_sizes_are_doubled_until_one_gains_little() -> None:
    def gains(*rates: float) -> bool:
        return still_gains([{"trained_tokens_per_s": rate} for rate in rates], 0.05)

    assert gains(100.0)
    assert gains(100.0, 106.0)
    assert not gains(80.0, 100.0, 104.0)


def test_a_synchronous_run_is_allowed_to_gain_its_tail_and_its_waits() -> None:
    busy = {"idle": 0.0, "overhead": 0.0}
    seen = Window(2, 20.0, 1000, 0.1, {"busy": 12.0, **busy}, {"busy": 5.0, **busy}, 0.0, 0)
    alone = Alone(engine=200.0, trainer=250.0)
    row = row_of("synchronous", 8, seen, alone)
    # At full speed 1,000 tokens take 5 s of the engine's 12 and 4 of the trainer's 5; for 3 s nobody worked.
    assert (row["tail_s"], row["waiting_s"]) == (3.5, 1.5)
    assert (row["generation_beyond_s"], row["training_beyond_s"]) == (3.5, 0.5)
    assert row["gain_allowed"] == 20.0 / (5.0 + 5.0)
    assert (row["trained_tokens_per_s"], row["over_ideal"], row["step_s"]) == (50.0, pytest.approx(0.45), 10.0)
    assert "gain_allowed" not in row_of("asynchronous", 8, seen, alone)


def test_figures_are_of_the_fastest_synchronous_run() -> None:
    asynchronous = {"trained_tokens_per_s": 80.0, "over_ideal": 0.9}
    slow = {"trained_tokens_per_s": 20.0, "gain_allowed": 5.0}
    fast = {"trained_tokens_per_s": 40.0, "gain_allowed": 2.5}
    assert figures_of(asynchronous, [], []) == {"e2e_over_ideal": 0.9}
    assert figures_of(asynchronous, [slow, fast], []) == {
        "e2e_over_ideal": 0.9,
        "async_over_sync_gpu": 2.0,
        "async_gain_over_allowed": 0.8,
    }
    turns = {"trained_tokens_per_s": 64.0}
    assert figures_of(asynchronous, [], [turns])["side_by_side_over_turns"] == 1.25


def test_sequences_that_are_met_are_longer_than_those_that_are_drawn() -> None:
    load = Load(median=100, cap=10_000, sigma=0.5)
    dice = np.random.default_rng(0)
    drawn, met = load.lengths(dice, 100_000), load.met_lengths(dice, 100_000)
    # A log-normal one's mean is exp(s²/2) times its median, and weighted by length exp(3 s²/2) times.
    assert drawn.mean() == pytest.approx(100 * math.exp(0.125), rel=0.01)
    assert met.mean() == pytest.approx(100 * math.exp(0.375), rel=0.02)
    assert Load(median=100, cap=120).met_lengths(dice, 1000).max() == 120


def test_the_engine_is_full_when_it_is_alone_and_a_run_is_set_beside_it() -> None:
    found = run(parts="async", device="cpu")
    alone, asynchronous = found["rows"]
    assert BENCHMARKS["e2e"] == "headrace.bench.e2e:run"
    assert 0.8 * TINY.running < alone["running"] <= TINY.running
    assert alone["ideal_tokens_per_s"] == Alone(alone["engine_tokens_per_s"], alone["trainer_tokens_per_s"]).ideal
    assert asynchronous["over_ideal"] == asynchronous["trained_tokens_per_s"] / alone["ideal_tokens_per_s"]
    assert 0 < asynchronous["staleness_mean"] <= asynchronous["staleness_max"] <= TINY.max_staleness
    assert found["figures"] == {}, "there are none of a CPU"


@pytest.mark.full
def test_runs_in_turns_may_be_stale_and_synchronous_ones_never_are() -> None:
    found = run(parts="sync,turns", device="cpu")
    _, in_turns, *synchronous = found["rows"]
    assert in_turns["run"] == "asynchronous, in turns"
    assert 0 < in_turns["staleness_max"] <= TINY.max_staleness
    assert [row["groups"] for row in synchronous] == list(TINY.sync_groups)
    for row in synchronous:
        assert row["staleness_max"] == 0
        spent = row["generation_s"] + row["training_s"] + row["waiting_s"]
        assert spent == pytest.approx(row["step_s"])


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="known: async, turns, sync"):
        run(parts="both")
