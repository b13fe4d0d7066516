"""What a summary says of a run's evaluations."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.telemetry.evaluations import contradiction, metric_of, scalars_of, shown, summary_of, warnings_of


def line(step: int, value: float | None, **fields: Any) -> dict[str, Any]:
    found = {"step": step, "set": "held_out", "metric": "accuracy", "pass_1": value, "tasks": 4, "samples": 1}
    return {**found, "failed": 0, "valid": True, **fields}


def test_before_and_after_are_the_first_and_the_last() -> None:
    found = summary_of([line(0, 0.25), line(5, 0.5), line(10, 0.75)])
    assert found == {"eval_before": 0.25, "eval_after": 0.75, "eval_metric": "accuracy"}
    assert summary_of([]) == {"eval_before": None, "eval_after": None, "eval_metric": None}


def test_an_invalid_evaluation_has_no_number_but_a_warning() -> None:
    bad = line(10, 0.75, failed=3, valid=False, failure_example="scorer_error: KeyError: 'answer'")
    assert summary_of([line(0, 0.25), bad])["eval_after"] is None
    assert warnings_of([line(0, 0.25), bad]) == [
        "evaluation of held_out at step 10: invalid: 3 of 4 completions failed and are not in it "
        "(scorer_error: KeyError: 'answer')"
    ]
    beside = line(10, 0.75, sets={"hard": line(10, 0.1, failed=1)})
    assert warnings_of([beside]) == ["evaluation of hard at step 10: 1 of 4 completions failed and are not in it"]


def test_both_are_rewards_where_one_is() -> None:
    assert summary_of([line(0, 0.0), line(5, 0.37, metric="reward")])["eval_metric"] == "reward"


def test_runs_from_before_it_was_named_have_accuracies_where_these_can_be() -> None:
    assert metric_of({"pass_1": 0.5}) == "accuracy"
    assert metric_of({"pass_1": -4.333}) == "reward"
    assert summary_of([{"step": 0, "pass_1": 0.5, "failed": 3}])["eval_before"] == 0.5


def test_a_reward_is_a_number_and_an_accuracy_a_percentage() -> None:
    assert [shown(0.125, "accuracy"), shown(-4.333, "reward"), shown(None, "reward")] == ["12.5%", "-4.333", "–"]


WHOLE = line(
    5, 0.5, pass_k=0.75, samples=2, pass_at={"1": 0.5, "2": 0.75}, low95=0.3, high95=0.7, failed=1,
    failed_frac=0.125, policy_failed=1, failures={"scorer_error": 1, "gave_up": 1},
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, None),
        ({"failed": 2}, "failures by reason"),
        ({"failures": {"scorer_error": 2}, "failed_frac": 0.2}, "share of failures"),
        ({"pass_1": 0.6}, "by k"),
        ({"pass_k": 0.9}, "by k"),
        ({"pass_1": 1.5, "pass_at": {"1": 1.5, "2": 0.75}}, "its mean is 1.5"),
        ({"pass_1": 0.8, "pass_at": {"1": 0.8, "2": 0.75}}, "outside of its interval"),
        ({"pass_1": None, "pass_at": {"1": None, "2": 0.75}}, "its mean is None"),
    ],
)
def test_what_within_an_evaluation_cannot_be_is_found(change: dict[str, Any], what: str | None) -> None:
    found = contradiction({**WHOLE, **change})
    assert (found is None) if what is None else (what in str(found))


def test_charts_get_every_number_of_every_set() -> None:
    found = scalars_of(
        {**line(5, 0.5, user={"right": 0.25}, valid=True), "sets": {"hard": {"pass_at": {"4": 0.75}}}}
    )
    assert found["evaluation/pass_1"] == 0.5
    assert found["evaluation/user/right"] == 0.25
    assert found["evaluation/hard/pass_at/4"] == 0.75
    assert "evaluation/valid" not in found
