"""A run in words."""

from __future__ import annotations

from headrace.telemetry.words import (
    ENGINE_WORDS,
    TRAINER_WORDS,
    idle_in_words,
    staleness_in_words,
    steps_in_words,
    time_in_words,
)
from headrace.waits import ENGINE_CAUSES, TRAINER_CAUSES


def test_one_version_is_one_version() -> None:
    assert staleness_in_words({"staleness_max": 0}) == "at most 0 versions"
    assert staleness_in_words({"staleness_max": 1}) == "at most 1 version"
    assert staleness_in_words({"staleness_max": 2}) == "at most 2 versions"
    assert staleness_in_words({}) == "at most 0 versions"


def test_steps_are_told_with_their_seconds_and_those_of_this_session_apart() -> None:
    assert steps_in_words({"steps": 1200, "seconds": 55.34}) == "1,200 in 55.3 s"
    assert steps_in_words({"steps": 120, "first_step": 100, "seconds": 8040.0}, " steps") == (
        "120 steps, of which 20 in 2h 14m"
    )


def test_every_cause_has_words() -> None:
    assert set(TRAINER_WORDS) == set(TRAINER_CAUSES)
    assert set(ENGINE_WORDS) >= set(ENGINE_CAUSES)


def test_idle_time_is_told_by_cause_the_longest_first() -> None:
    shares = {"scoring": 0.07, "generation": 0.38, "turns": 0.001}
    assert idle_in_words(shares, TRAINER_WORDS) == "45% of the time, waiting for generation 38%, scoring 7%"
    assert idle_in_words({"scoring": 0.0}, TRAINER_WORDS) == "0% of the time"


def test_how_long_both_sides_worked_at_once_is_told_where_they_did() -> None:
    time = {"seconds": 30.0, "trainer_idle": {"generation": 0.5}, "engine_idle": {"training": 0.2}, "together": 0.4}
    assert time_in_words({"time": time}) == [
        ("trainer idle", "50% of the time, waiting for generation 50%"),
        ("engines idle", "20% of the time, waiting for the trainer's step 20%"),
        (
            "side by side",
            "both worked at once for 12.0 s of 30.0 s (what taking turns would take: --set buffer.max_staleness=0)",
        ),
    ]
    assert [name for name, _ in time_in_words({"time": time | {"together": 0.0}})] == [
        "trainer idle",
        "engines idle",
    ]
    assert time_in_words({"time": None}) == []
