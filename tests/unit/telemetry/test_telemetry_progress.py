"""Progress says how far, how fast and how long still; in a log file, not too often."""

from __future__ import annotations

import io

import pytest
from batch_builders import metric_line

from headrace.telemetry.progress import RunProgress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(steps: int, seconds_per_step: float, first: int = 1) -> list[str]:
    clock, stream = Clock(), io.StringIO()
    progress = RunProgress("demo", steps, stream=stream, clock=clock)
    for step in range(first, steps + 1):
        clock.now += seconds_per_step
        progress.step(metric_line(step))
    progress.close()
    return stream.getvalue().splitlines()


def test_a_line_has_reward_rates_staleness_idle_time_and_the_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = RunProgress("demo", 100, stream=stream, clock=clock)
    progress.event("evaluated", {"step": 0, "pass_1": 0.125})
    clock.now = 3.0
    progress.step(
        metric_line(
            1,
            reward_mean=0.25,
            gen_tokens_per_s=12345.6,
            train_tokens_per_s=999.0,
            staleness_mean=1.25,
            staleness_max=2,
            engine_idle_frac=0.05,
            trainer_idle_frac=0.4,
        )
    )
    assert stream.getvalue().splitlines() == [
        "[demo] evaluation at step 0: accuracy 12.5%",
        "[demo] step 1/100  reward 0.250  accuracy 12.5%  tok/s 12,346 gen, 999 train  staleness 1.2 (max 2)  "
        "idle 5% gen, 40% train  left 4m 57s",
    ]


def test_a_fast_run_prints_every_tenth_and_a_slow_one_every_few_seconds() -> None:
    assert len(run(steps=100, seconds_per_step=0.01)) == 11
    slow = run(steps=50, seconds_per_step=6.0)
    assert len(slow) == 50
    long = run(steps=10_000, seconds_per_step=6.0)
    assert 100 < len(long) < 400


def test_the_time_left_of_a_resumed_run_counts_only_its_own_steps() -> None:
    lines = run(steps=100, seconds_per_step=2.0, first=51)
    assert lines[0].endswith("left 1m 38s")
    assert lines[-1].endswith("left 0s")


def test_a_terminal_gets_a_live_bar() -> None:
    stream = io.StringIO()
    progress = RunProgress("demo", 10, stream=stream, live=True)
    progress.step(metric_line(10, reward_mean=0.625))
    progress.close()
    assert "10/10" in stream.getvalue()
    assert "0.625" in stream.getvalue()


def test_a_missing_number_is_a_dash_and_not_an_error() -> None:
    stream = io.StringIO()
    progress = RunProgress("demo", 10, stream=stream)
    progress.step({"step": 1, "reward_mean": None})
    assert "reward –" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (185, "3m 05s"), (3599.6, "1h 00m"), (8040, "2h 14m")]
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def said(*events: dict[str, object], steps: int = 10, live: bool | None = None) -> list[str]:
    stream = io.StringIO()
    progress = RunProgress("demo", steps, stream=stream, live=live)
    for event in events:
        progress.event("evaluated", dict(event))
    progress.step(metric_line(steps))
    progress.close()
    return stream.getvalue().splitlines()


HALF_FAILED = {
    "step": 0, "set": "held_out", "metric": "reward", "pass_1": -0.867, "low95": -0.95, "high95": -0.75,
    "tasks": 60, "samples": 1, "failed": 30, "valid": False, "failure_example": "scorer_error: KeyError: 'answer'",
}  # fmt: skip


def test_an_evaluation_is_called_what_it_is_and_says_what_failed() -> None:
    """±1 was "-433.3%" of "accuracy", and a scorer that always fails was "accuracy 0.0%"."""
    first, line = said(HALF_FAILED)
    assert first == (
        "[demo] evaluation at step 0: reward -0.867 (95%: -0.950 to -0.750). invalid: 30 of 60 completions failed "
        "and are not in it (scorer_error: KeyError: 'answer')"
    )
    assert "  held-out reward -0.867 (invalid)  tok/s" in line
    none = {**HALF_FAILED, "pass_1": None, "low95": None, "high95": None, "metric": "accuracy", "failed": 60}
    first, line = said(none)
    assert first.startswith("[demo] evaluation at step 0: accuracy –. invalid: 60 of 60 completions failed")
    assert "  accuracy – (invalid)  tok/s" in line


def test_a_few_failures_are_told_of_beside_a_number_that_counts() -> None:
    few = {
        **HALF_FAILED,
        "metric": "accuracy",
        "pass_1": 0.5,
        "low95": 0.4,
        "high95": 0.6,
        "failed": 2,
        "valid": True,
    }
    first, line = said(few)
    assert first.endswith(
        "accuracy 50.0% (95%: 40.0% to 60.0%). 2 of 60 completions failed and are not in it "
        "(scorer_error: KeyError: 'answer')"
    )
    assert "  accuracy 50.0%  tok/s" in line


def test_every_set_has_its_line_and_several_completions_their_pass_at_k() -> None:
    hard = {"metric": "reward", "pass_1": 1.5, "pass_k": 4.25, "samples": 8, "tasks": 3, "failed": 0, "valid": True}
    both = {"step": 5, "set": "held_out", "metric": "accuracy", "pass_1": 0.25, "pass_k": 0.5, "samples": 4,
            "tasks": 3, "failed": 0, "valid": True, "sets": {"hard": hard}}  # fmt: skip
    assert said(both)[:2] == [
        "[demo] evaluation of held_out at step 5: accuracy 25.0%, pass@4 50.0%",
        "[demo] evaluation of hard at step 5: reward 1.500, best of 8 4.250",
    ]


def test_a_live_bar_prints_the_warning_above_itself() -> None:
    assert "30 of 60 completions failed" in " ".join(" ".join(said(HALF_FAILED, live=True)).split())
