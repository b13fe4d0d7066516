from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bounds import (
    MAX_TEXT,
    SYSTEM_REASONS,
    SystemFailure,
    checked_metrics,
    clip,
    described,
    text_of,
    users_reason,
)

TASKS = Path(__file__).parents[2] / "docs" / "tasks.md"


def test_the_documentation_explains_each_reason_of_the_system() -> None:
    table = TASKS.read_text(encoding="utf-8").split("| reason | the episode |")[1].split("\n\n")[0]
    explained = {
        word
        for line in table.splitlines()
        for word in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    assert explained == SYSTEM_REASONS


@given(st.text(max_size=5000))
def test_a_clipped_text_is_the_text_or_its_beginning_and_its_length(text: str) -> None:
    found = clip(text)
    assert len(found) <= MAX_TEXT
    if len(text) <= MAX_TEXT:
        assert found == text
    else:
        kept = found.removesuffix(f"… ({len(text)} characters)")
        assert text.startswith(kept)
        assert len(found) == MAX_TEXT


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_exception_whose_text_cannot_be_had_is_named_all_the_same() -> None:
    assert described(Mute()) == "Mute: (its text cannot be had: RuntimeError)"


def test_a_text_that_no_message_could_carry_is_mended() -> None:
    assert text_of("a\ud800b") == "a?b"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("dead_end", "dead_end"),
        ("late", "user_late"),
        ("bad_reason", "user_bad_reason"),
        ("0.5-x", "0.5-x"),
        ("", "bad_reason"),
        ("Dead end", "bad_reason"),
        ("x" * 65, "bad_reason"),
        ("x\n", "bad_reason"),
        ("_x", "bad_reason"),
    ],
)
def test_a_users_reason_is_a_short_word_that_is_not_the_systems(given: str, kept: str) -> None:
    reason, detail = users_reason(given, "the detail")
    assert reason == kept
    if kept == "bad_reason":
        assert detail == (
            f"a reason is a word of at most 64 of a-z, 0-9, '_', '.' and '-' (got {clip(given, 100)!r}): the detail"
        )
    else:
        assert detail == "the detail"


def test_metrics_are_few_finite_numbers_by_short_names() -> None:
    found = checked_metrics({"a": 1, "b": float("nan"), "c": True, 4: 2.5, "d": float("-inf")})
    assert found == {"a": 1.0, "c": 1.0, "4": 2.5}
    with pytest.raises(SystemFailure) as caught:
        checked_metrics({str(i): i for i in range(65)})
    assert (caught.value.reason, caught.value.detail) == (
        "bad_metrics",
        "an episode has at most 64 metrics (got 65)",
    )
    with pytest.raises(SystemFailure, match="a metric's name has at most 64 characters"):
        checked_metrics({"x" * 65: 1.0})
