"""What counts as a reward, of whatever a user's scorer returns."""

from __future__ import annotations

import inspect
from typing import Any

from headrace.bounds import SystemFailure, text_of
from headrace.errors import quoted

MAX_ABS_REWARD = 1e12
"""Larger rewards are rejected: they are mistakes, and their advantages would overflow."""


def reward_of(value: Any) -> float:
    """The number that a scorer gave: Python's, NumPy's, or a tensor with one element. All else is `bad_reward`."""
    if value is None:
        raise _bad_reward("None", "let every way through the scorer end with a `return`")
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise _bad_reward("a coroutine", "`await` it in the scorer, which may be an `async def`")
    kind = type(value).__name__
    if isinstance(value, str | bytes):
        raise _bad_reward(f"a text, {quoted(value)}", "return float(…) of it")
    if isinstance(value, dict | list | tuple | set):
        example = "Score(reward, {name: number})" if isinstance(value, dict | tuple) else "one float"
        raise _bad_reward(f"a {kind}, {quoted(value)}", f"return {example} for the attempt")
    try:
        reward = float(value)
    except Exception as error:
        raise _bad_reward(f"a {kind}: {text_of(error, 200)}", "return a float; of a tensor its .item()") from error
    if not abs(reward) <= MAX_ABS_REWARD:
        raise _bad_reward(str(reward), "look for a division by zero or a mistake in its scale")
    return reward


def _bad_reward(got: str, remedy: str) -> SystemFailure:
    rule = f"a reward is a number of at most ±{MAX_ABS_REWARD:g}"
    return SystemFailure("bad_reward", f"{rule} (got {got}); {remedy}")
