from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.audit.tolerance import Comparison, Tolerance, runs_of, tolerance_of
from headrace.engine.config import NativeEngineConfig
from headrace.records import KvEvent, Turn

KINDS = [{"kv_dtype": "fp8"}, {"weight_dtype": "fp8"}, {"kv_dtype": "fp8", "weight_dtype": "fp8"}]
CONTEXT = 5


def turn(tokens: int, *swaps_at: int) -> Turn:
    """Of so many tokens after a context of five; each of these is the first of another version."""
    lineage = [KvEvent(position=0, version=0, before="kept", cause="start")]
    lineage += [KvEvent(CONTEXT + at - 1, i, "kept", "swap") for i, at in enumerate(swaps_at, start=1)]
    versions = np.searchsorted(swaps_at, np.arange(tokens), side="right").astype(np.int32)
    zeros = np.zeros(tokens, np.int32)
    return Turn(
        zeros, zeros.astype(np.float32), versions, np.zeros(CONTEXT, np.int32), "length", lineage=(*lineage,)
    )


def compared(tolerance: Tolerance, *turns: tuple[Turn, np.ndarray], shaken: float = 0.0) -> Comparison:
    comparison = Comparison(tolerance)
    for one, differences in turns:
        comparison.add(one, CONTEXT, differences, np.full(len(differences), shaken))
    return comparison


def fp8(dtype: str) -> Tolerance:
    return tolerance_of(NativeEngineConfig(dtype=dtype, kv_dtype="fp8"))


# ── Without FP8 ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_without_fp8_one_token_too_far_off_breaks_it_and_nothing_else(dtype, bound):
    tolerance = tolerance_of(NativeEngineConfig(dtype=dtype))
    assert tolerance == (bound, math.inf, math.inf)
    assert not tolerance.needs_shaking
    within = [(turn(n, *swaps), np.full(n, bound)) for n, swaps in ((1, ()), (3, (2,)), (9, (1, 5)))]
    comparison = compared(tolerance, *within)
    assert (comparison.broken_turns(), comparison.broken_kinds()) == ([], [])
    off = np.array([0.0, 2.0, 0.9, 3.0, 0.0, 2.5]) * bound
    assert compared(tolerance, *within, (turn(6, 2), off)).broken_turns() == [(3, 3)]


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_begins_with_the_token_after_an_event_s_position():
    lineage = (
        KvEvent(0, 3, "kept", "start"),
        KvEvent(4, 4, "kept", "swap"),
        KvEvent(6, 5, "kept", "swap"),
        KvEvent(9, 5, "recomputed", "preempt"),
    )
    zeros = np.zeros(7, np.int32)
    made = Turn(zeros, zeros.astype(np.float32), zeros, zeros[:5], "length", lineage=lineage)
    swap, preempt = "swap (cache kept)", "preempt (cache recomputed)"
    # The first log-prob is of the pass over position 4: nothing was sampled under version 3.
    assert runs_of(made, 5) == [(swap, slice(0, 2)), (swap, slice(2, 5)), (preempt, slice(5, 7))]
    assert runs_of(turn(4), CONTEXT) == [("start (cache kept)", slice(0, 4))]
    assert [rows for _, rows in runs_of(turn(4, 4), CONTEXT)] == [slice(0, 4)]


# ── With FP8 ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_with_fp8_there_is_a_bound_for_every_token_every_run_and_all_runs_alike(kind):
    assert tolerance_of(NativeEngineConfig(**kind)) == (2.0, 0.25, 2e-4)
    assert tolerance_of(NativeEngineConfig(dtype="bfloat16", **kind)) == (10.0, 0.5, 0.02)
    assert tolerance_of(NativeEngineConfig(**kind)).needs_shaking


def test_of_a_run_the_farthest_tenth_is_left_out_and_the_rest_is_judged_on_average():
    tolerance = Tolerance(2.0, 0.25, 2e-4)
    assert tolerance.broken_at(np.array([1.9])) is None
    assert tolerance.broken_at(np.array([0.0, 2.1, 0.0])) == 1
    assert tolerance.broken_at(np.array([0.3, 0.2, 1.9])) is None
    assert tolerance.broken_at(np.array([0.3, 0.3, 1.9])) == 2
    assert tolerance.broken_at(np.array([0.3, 0.3, 1.9]), shaken=0.1) is None
    assert tolerance.broken_at(np.array([1.9, 1.9] + 17 * [0.1])) is None
    assert tolerance.broken_at(np.array([1.9, 1.9, 1.9] + 17 * [0.1])) is None
    assert tolerance.broken_at(np.array([1.9, 1.9, 1.9, 1.9, 1.9] + 15 * [0.1])) == 0
    assert tolerance.broken_at(np.zeros(0)) is None


def test_of_runs_alike_the_worst_is_left_out_and_a_tenth_of_the_others_tokens_may_be_off():
    tolerance = Tolerance(2.0, 0.25, 2e-4)
    fine, off = np.zeros(10), np.full(10, 0.1)
    assert not tolerance.broken_by([off])
    assert not tolerance.broken_by([off, fine])
    assert not tolerance.broken_by([off, off] + 10 * [fine])
    assert tolerance.broken_by([off, off] + 8 * [fine])
    assert not tolerance.broken_by([off, off] + 8 * [fine], shaken=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_a_number_always_breaks_it(dtype):
    for tolerance in (fp8(dtype), tolerance_of(NativeEngineConfig(dtype=dtype))):
        off = np.array([0.0, math.nan, 0.0, 0.0])
        assert compared(tolerance, (turn(4), off)).broken_turns() == [(0, 1)]


def test_what_single_values_rounded_otherwise_do_is_no_violation():
    rng = np.random.default_rng(0)
    turns = []
    for i in range(40):
        differences = rng.exponential(0.01, 100)
        # One token a lot, or all that come after a little.
        differences[rng.integers(100)] += 3.0
        if i % 8 == 0:
            differences[rng.integers(100) :] += 0.02
        turns.append((turn(100, 55), differences))
    comparison = compared(fp8("bfloat16"), *turns, shaken=0.02)
    assert (comparison.broken_turns(), comparison.broken_kinds()) == ([], [])


# ── What must be found ───────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_lineage_after_the_swap_of_every_second_turn_is_found():
    rng = np.random.default_rng(0)
    turns = []
    for i in range(20):
        differences = np.abs(rng.normal(0, 0.02, 100))
        differences[55:] += 3.0 * (i % 2)
        turns.append((turn(100, 55), differences))
    comparison = compared(fp8("bfloat16"), *turns, shaken=0.05)
    assert [number for number, token in comparison.broken_turns()] == list(range(1, 20, 2))
    assert all(token >= 55 for _, token in comparison.broken_turns())
    assert [kind for kind, _, _ in comparison.broken_kinds()] == ["swap (cache kept)"]


def test_one_token_turns_of_which_a_quarter_is_off_are_found():
    def off(nats: float) -> Comparison:
        differences = [nats] * 24 + [0.0] * 76
        return compared(fp8("bfloat16"), *((turn(1), np.array([one])) for one in differences), shaken=0.01)

    assert [number for number, _ in off(20.0).broken_turns()] == list(range(24))
    assert off(3.0).broken_turns() == []
    [(kind, mean, shaken)] = off(3.0).broken_kinds()
    assert kind == "start (cache kept)"
    assert (mean, shaken) == pytest.approx((0.72, 0.01))


def test_a_version_that_is_a_little_off_in_every_second_half_is_found_by_all_of_them_together():
    rng = np.random.default_rng(1)
    turns = []
    for _ in range(60):
        differences = np.abs(rng.normal(0, 1e-6, 12))
        # Most tokens are nearly certain under any version.
        differences[6:] += np.where(rng.random(6) < 0.3, rng.exponential(5e-3, 6), 1e-5)
        turns.append((turn(12, 6), differences))
    comparison = compared(fp8("float32"), *turns, shaken=1e-6)
    assert comparison.broken_turns() == []
    assert [kind for kind, _, _ in comparison.broken_kinds()] == ["swap (cache kept)"]


def test_a_model_that_rounding_moves_as_far_is_given_the_benefit_of_the_doubt():
    turns = [(turn(12, 6), np.full(12, 0.01)) for _ in range(10)]
    assert len(compared(fp8("float32"), *turns, shaken=1e-3).broken_kinds()) == 2
    assert compared(fp8("float32"), *turns, shaken=6e-3).broken_kinds() == []
