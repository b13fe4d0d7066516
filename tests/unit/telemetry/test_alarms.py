"""Alarms: after a while, once, with advice, and over again when all is well."""

from __future__ import annotations

import io

import pytest

from headrace.telemetry.alarms import PATIENCE, RULES, Alarms
from headrace.telemetry.progress import RunProgress


def changes(alarms: Alarms, values: list[float], metric: str = "drift_kl") -> list[tuple[int, bool]]:
    return [(i, one.on) for i, value in enumerate(values) for one in alarms.look({metric: value})]


def test_it_begins_once_when_steps_in_a_row_are_out_of_range_and_ends_likewise() -> None:
    alarms = Alarms()
    assert changes(alarms, [0.2] * (PATIENCE - 1) + [0.0] + [0.2] * (PATIENCE + 3)) == [(2 * PATIENCE - 1, True)]
    assert alarms.on == {"drift_kl"}
    assert changes(alarms, [0.0] * (PATIENCE - 1) + [0.2] + [0.05] * (PATIENCE + 3)) == [(2 * PATIENCE - 1, False)]
    assert alarms.on == set()


def test_a_metric_that_is_missing_or_no_number_is_left_as_it_was() -> None:
    alarms = Alarms()
    changes(alarms, [0.2] * (PATIENCE - 1))
    assert alarms.look({}) == alarms.look({"drift_kl": None}) == []
    assert [one.on for one in alarms.look({"drift_kl": 0.2})] == [True]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.metric)
def test_every_rule_has_a_range_of_its_own_and_advice(rule) -> None:
    assert sum(other.metric == rule.metric for other in RULES) == 1
    assert rule.low < rule.high
    assert len(rule.advice) > 40
    healthy = (rule.low + rule.high) / 2
    assert changes(Alarms(), [healthy] * 20, rule.metric) == []
    bad = rule.low - 0.1 if rule.high == 1.0 else rule.high * 1.01
    assert changes(Alarms(), [bad] * 20, rule.metric) == [(PATIENCE - 1, True)]


def test_progress_says_it_with_the_advice() -> None:
    stream = io.StringIO()
    progress = RunProgress("run", 10, stream=stream, live=False)
    fields = {"step": 7, "metric": "drift_kl", "value": 0.25, "low": 0.0, "high": 0.1, "advice": "lower it"}
    progress.event("alarm", fields | {"on": True})
    progress.event("alarm", fields | {"on": False, "step": 9, "value": 0.05})
    assert stream.getvalue().splitlines() == [
        "[run] step 7: drift_kl is 0.25, healthy is 0 to 0.1. Lower it.",
        "[run] step 9: drift_kl is 0.05, healthy again (healthy is 0 to 0.1).",
    ]
