from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.audit.tolerance import Tolerance, tolerance_of
from headrace.engine.config import NativeEngineConfig


def test_without_fp8_one_token_too_far_off_breaks_it():
    tolerance = tolerance_of(NativeEngineConfig())
    assert tolerance == (1e-4, 1e-4)
    assert tolerance.broken_at(np.array([0.0, 9e-5, 2e-5])) is None
    assert tolerance.broken_at(np.array([0.0, 2e-4, 2e-5])) == 1
    assert tolerance_of(NativeEngineConfig(dtype="bfloat16")) == (0.1, 0.1)


@pytest.mark.parametrize("key", ["kv_dtype", "weight_dtype"])
def test_with_fp8_it_takes_most_tokens_or_one_beyond_what_a_flipped_value_moves(key):
    tolerance = tolerance_of(NativeEngineConfig(**{key: "fp8"}))
    assert tolerance == (5e-4, 0.5)
    assert tolerance.broken_at(np.array([0.0, 0.49, 0.0, 6e-4, 7e-4, 0.0])) is None
    assert tolerance.broken_at(np.array([6e-4, 3e-3, 0.0, 6e-4, 7e-4, 6e-4])) == 1
    assert tolerance.broken_at(np.array([0.0, 0.0, 0.51, 0.0, 0.0])) == 2
    # Too few tokens to tell.
    assert tolerance.broken_at(np.array([6e-4])) is None
    assert tolerance.broken_at(np.array([6e-4, 0.0, 0.0])) is None
    assert tolerance.broken_at(np.array([6e-4, 7e-4, 0.0])) == 1
    assert tolerance_of(NativeEngineConfig(dtype="bfloat16", **{key: "fp8"})) == (0.1, math.inf)


def test_with_fp8_many_tokens_off_by_a_little_break_it_though_no_turn_does():
    tolerance = tolerance_of(NativeEngineConfig(kv_dtype="fp8"))
    assert not tolerance.broken_by_all(np.array([6e-4] * 25 + [0.0] * 75))
    assert tolerance.broken_by_all(np.array([6e-4] * 26 + [0.0] * 74))
    assert not tolerance.broken_by_all(np.zeros(0))


def test_what_is_not_a_number_always_breaks_it():
    assert Tolerance(0.1, math.inf).broken_at(np.array([0.0, math.nan, 0.0, 0.0])) == 1


def test_no_tokens_agree():
    assert Tolerance(1e-4, 1e-4).broken_at(np.zeros(0)) is None
