"""Failures of training episodes are told of while the run goes on: how many, why, and what to do."""

from __future__ import annotations

import io
from typing import Any

import pytest

from headrace.bounds import SYSTEM_REASONS
from headrace.telemetry.failures import NOT_FAILURES, FailureWatch, advice, training_warning
from headrace.telemetry.progress import RunProgress

ERROR = ("scorer_error", "KeyError: 'answer'")


def run(watch: FailureWatch, *outcomes: tuple[str, str] | None) -> list[tuple[int, str, dict[str, Any]]]:
    """What is told, and after how many episodes."""
    return [
        (number, kind, fields)
        for number, outcome in enumerate(outcomes, start=1)
        for kind, fields in (watch.ended(*outcome) if outcome else watch.ended(None))
    ]


def test_a_run_that_fails_from_the_beginning_is_told_of_after_a_few_episodes() -> None:
    told = run(FailureWatch(160), *[ERROR] * 40)
    assert [(number, kind) for number, kind, _ in told] == [(16, "failing"), (16, "alarm")]
    assert told[1][2] == {
        "metric": "failed_frac", "value": 1.0, "low": 0.0, "high": 0.1, "on": True, "share": 1.0, "episodes": 16,
        "commonest": "scorer_error", "commonest_share": 1.0, "example": "KeyError: 'answer'",
        "advice": "mend the code of scorer.source; events.jsonl has each episode's error",
    }  # fmt: skip


def test_a_few_per_cent_are_shown_and_a_quarter_is_an_alarm() -> None:
    told = run(FailureWatch(100), *[ERROR if i % 10 == 0 else None for i in range(1, 200)])
    assert {kind for _, kind, _ in told} == {"failing"}
    told = run(FailureWatch(100), *[ERROR if i % 4 == 0 else None for i in range(1, 200)])
    assert "alarm" in {kind for _, kind, _ in told}
    assert run(FailureWatch(100), *[ERROR if i % 30 == 0 else None for i in range(1, 300)]) == []


def test_it_is_told_again_when_the_share_moves_and_when_all_is_well() -> None:
    watch = FailureWatch(40)
    run(watch, *[ERROR] * 40)
    told = run(watch, *[None] * 60)
    alarms = [(number, fields["on"]) for number, kind, fields in told if kind == "alarm"]
    # Below a tenth of 40: three are left.
    assert alarms == [(37, False)]
    shares = [fields["share"] for _, kind, fields in told if kind == "failing"]
    # It was told at 16, so 24 episodes before these, and is told again a window later at the earliest.
    assert shares == [0.6, 0.0]


def test_the_commonest_reason_is_the_one_that_is_named() -> None:
    watch = FailureWatch(20)
    run(watch, *[("environment_timeout", "no result within 5 s")] * 12, *[ERROR] * 8)
    [(_, _, fields)] = [one for one in run(watch, *[ERROR] * 30) if one[1] == "failing"]
    assert (fields["commonest"], fields["example"]) == ERROR


def test_the_share_of_a_step_is_of_the_episodes_that_ended_since_the_one_before() -> None:
    watch = FailureWatch(100)
    run(watch, ERROR, None, None, None)
    assert watch.take_frac() == 0.25
    assert watch.take_frac() is None
    run(watch, ("late", ""), None)
    assert watch.take_frac() == 0.0


@pytest.mark.parametrize("reason", sorted(SYSTEM_REASONS - NOT_FAILURES))
def test_every_reason_has_advice(reason: str) -> None:
    assert len(advice(reason)) > 30


def test_timeouts_name_the_setting() -> None:
    assert "scorer.timeout_s" in advice("scorer_timeout")
    assert "logs/environment-0.log" in advice("environment_crash")


def test_a_finished_runs_failures_are_summed_up_without_what_it_dropped_itself() -> None:
    ledger = {"admitted": 1600, "dropped": {"scorer_error": 1400, "bad_reward": 40, "group_below_minimum": 160}}
    assert training_warning(ledger) == ("90% of 1,600 training episodes failed (scorer_error 1,400, bad_reward 40)")
    assert training_warning({"admitted": 100, "dropped": {"run_finished": 60, "scorer_error": 4}}) is None
    assert training_warning({"admitted": 0, "dropped": {}}) is None


def test_progress_says_at_once_what_fails_and_keeps_saying_it_in_its_line() -> None:
    stream = io.StringIO()
    progress = RunProgress("demo", 10, stream=stream)
    watch = FailureWatch(160)
    for _ in range(16):
        for kind, fields in watch.ended(*ERROR):
            progress.event(kind, {"step": 0, **fields})
    progress.step({"step": 1})
    alarm, line = stream.getvalue().splitlines()
    assert alarm == (
        "[demo] step 0: training episodes fail: 100% of the last 16 episodes, scorer_error: KeyError: 'answer'. "
        "Mend the code of scorer.source; events.jsonl has each episode's error."
    )
    assert line.endswith("failed 100% of the last 16 episodes, scorer_error: KeyError: 'answer'  left 0s")


def test_a_live_bar_shows_it_before_the_first_step() -> None:
    stream = io.StringIO()
    progress = RunProgress("demo", 10, stream=stream, live=True)
    for _ in range(16):
        for kind, fields in FailureWatch(1).ended(*ERROR):
            progress.event(kind, {"step": 0, **fields})
    progress.close()
    assert "scorer_error" in stream.getvalue()
