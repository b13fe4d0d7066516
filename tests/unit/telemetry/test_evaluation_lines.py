"""What a summary says of a run's evaluations."""

from __future__ import annotations

from typing import Any

from headrace.telemetry.evaluations import metric_of, shown, summary_of, warnings_of


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
