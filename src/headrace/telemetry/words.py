"""A run in words, as the summary in the terminal and the picture's title say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.telemetry.progress import duration

TRAINER_WORDS = {
    "generation": "generation",
    "environment": "the environment",
    "scoring": "scoring",
    "publication": "publication",
    "evaluation": "an evaluation",
    "turns": "engines to sleep or wake",
    "controller": "the controller",
}
ENGINE_WORDS = {
    **TRAINER_WORDS,
    "training": "the trainer's step",
    "end": "the end (all was sampled)",
    "turns": "their turn",
}
"""What is waited for, by cause (waits.py)."""
_TOLD = 0.005
"""Causes with smaller shares of the time are not told."""


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 600 else duration(seconds)


def steps_in_words(summary: Mapping[str, Any], noun: str = "") -> str:
    """120 in 37.5 s; of a session that went on: 120, of which 20 in 9.1 s. With a noun, 120 steps."""
    done, begun = summary.get("steps", 0), summary.get("first_step") or 0
    whole = f"{done:,}{noun}"
    spent = f"in {seconds_in_words(summary.get('seconds') or 0.0)}"
    return f"{whole} {spent}" if not begun else f"{whole}, of which {done - begun:,} {spent}"


def staleness_in_words(summary: Mapping[str, Any]) -> str:
    versions = summary.get("staleness_max") or 0
    return f"at most {versions:,} {'version' if versions == 1 else 'versions'}"


def idle_in_words(shares: Mapping[str, float], words: Mapping[str, str]) -> str:
    """45% of the time, waiting for generation 38%, scoring 7%"""
    told = sorted((-share, why) for why, share in shares.items() if share >= _TOLD)
    text = f"{sum(shares.values()):.0%} of the time"
    if told:
        text += ", waiting for " + ", ".join(f"{words.get(why, why)} {-share:.0%}" for share, why in told)
    return text


def overlap_in_words(time: Mapping[str, Any]) -> str | None:
    """How long both sides worked at once. What that is worth, only a run that takes turns can tell: either side may
    be faster alone, where they share cores, and a batch that waits for a scorer holds up nobody here."""
    together, seconds = time.get("together") or 0.0, time.get("seconds") or 0.0
    if together < _TOLD:
        return None
    return (
        f"both worked at once for {seconds_in_words(together * seconds)} of {seconds_in_words(seconds)} "
        "(what taking turns would take: --set buffer.max_staleness=0)"
    )


def time_in_words(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where the session's time went, as names and sentences."""
    time = summary.get("time")
    if not isinstance(time, Mapping):
        return []
    facts = [
        ("trainer idle", idle_in_words(time["trainer_idle"], TRAINER_WORDS)),
        ("engines idle", idle_in_words(time["engine_idle"], ENGINE_WORDS)),
    ]
    overlap = overlap_in_words(time)
    return [*facts, ("side by side", overlap)] if overlap else facts
