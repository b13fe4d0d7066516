"""Users' metrics as numbers of a step and of a run."""

from __future__ import annotations

import pytest

from headrace.telemetry.metrics import MAX_USER_KEYS, mean, users_keys, users_means, users_summary


def test_a_mean_is_over_those_that_have_it() -> None:
    assert users_keys([{"a": 1.0, "b": 4.0}, {"a": 2.0}, {}]) == {"user/a": 1.5, "user/b": 4.0}


def test_of_too_many_names_those_are_left_out_that_fewest_episodes_have() -> None:
    names = {f"n{i:03}": 0.0 for i in range(MAX_USER_KEYS + 2)}
    found = users_means([names, {"n257": 2.0, "n256": 2.0}])
    assert len(found) == MAX_USER_KEYS
    assert (found["n257"], found["n256"]) == (1.0, 1.0)
    assert "n253" in found
    assert not {"n254", "n255"} & found.keys()


def test_the_largest_numbers_have_a_mean() -> None:
    assert mean([1.7e308, 1.7e308]) == pytest.approx(1.7e308)
    assert mean([0.1] * 10) == 0.1


def test_a_summary_has_the_last_ten_steps() -> None:
    lines = [{"step": i, "user/a": float(i), "loss": 3.0} for i in range(20)]
    lines[-1]["user/b"] = 7.0
    assert users_summary(lines) == {"a": 14.5, "b": 7.0}
    assert users_summary([]) == {}
