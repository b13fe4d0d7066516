"""Bounds on what users' code hands to the run: texts, reasons, metrics, messages. Both processes apply them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from headrace.errors import EpisodeFailure

MAX_TEXT = 2000
"""Characters of one error's text that are kept."""
MAX_METRICS = 64
"""Numbers that an environment, and a scorer, may keep with one episode."""
MAX_METRIC_NAME = 64
"""Characters."""
MAX_OWN_REASONS = 64
"""Different reasons of their own that a run's environments, and its scorers, may give."""
MAX_MESSAGE_BYTES = 16 << 20
"""Largest message that a worker may send."""

SYSTEM_REASONS = frozenset(
    {
        "abandoned",
        "attempt_begun_again",
        "bad_metrics",
        "bad_reason",
        "bad_request",
        "bad_reward",
        "bad_turn",
        "chat_template",
        "engine_died",
        "environment_crash",
        "environment_error",
        "environment_timeout",
        "equal_rewards",
        "group_below_minimum",
        "late",
        "lost_in_crash",
        "message_too_large",
        "no_tokens",
        "orphaned_by_restore",
        "prompt_too_long",
        "run_finished",
        "scorer_crash",
        "scorer_error",
        "scorer_timeout",
        "shutdown",
        "too_many_samples",
    }
)
"""Why the run itself drops episodes. docs/tasks.md explains each; users' code has other words."""

_REASON = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class SystemFailure(EpisodeFailure):
    """An EpisodeFailure that Headrace raises within a worker; that of users' code is told apart by its class."""


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """The text, or its beginning and how much was cut off."""
    if len(text) <= limit:
        return text
    end = f"… ({len(text)} characters)"
    return text[: limit - len(end)] + end


def text_of(value: object, limit: int = MAX_TEXT) -> str:
    """What users' code has for a text, clipped and encodable. Whatever its own `__str__` raises, there is one."""
    try:
        text = clip(value if isinstance(value, str) else str(value), limit)
        return text.encode(errors="replace").decode()
    except BaseException as error:  # an exit would end the worker, and with it the episodes beside this one
        return f"(its text cannot be had: {type(error).__name__})"


def described(error: BaseException) -> str:
    name = f"{clip(type(error).__name__, 100)}: "
    return name + text_of(error, MAX_TEXT - len(name))


def users_reason(reason: str, detail: str) -> tuple[str, str]:
    """The reason and detail that the ledger gets for an EpisodeFailure of users' code."""
    if _REASON.fullmatch(reason) is None:
        rule = "a reason is a word of at most 64 of a-z, 0-9, '_', '.' and '-'"
        return "bad_reason", clip(f"{rule} (got {clip(reason, 100)!r}): {detail}")
    if reason in SYSTEM_REASONS:
        reason = f"user_{reason}"
    return reason, clip(detail)


def checked_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """As numbers by name. Those that are not finite are left out."""
    if not isinstance(metrics, Mapping):
        what = f"{type(metrics).__name__}, {text_of(repr(metrics), 100)}"
        raise SystemFailure(
            "bad_metrics", f"metrics are a dict of names and numbers (got a {what}); return one, or None"
        )
    if len(metrics) > MAX_METRICS:
        raise SystemFailure("bad_metrics", f"an episode has at most {MAX_METRICS} metrics (got {len(metrics)})")
    found = {text_of(name): _metric(text_of(name, 100), value) for name, value in metrics.items()}
    for name in found:
        if len(name) > MAX_METRIC_NAME:
            rule = f"a metric's name has at most {MAX_METRIC_NAME} characters"
            raise SystemFailure("bad_metrics", f"{rule} (got {clip(name, 100)!r})")
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except Exception as error:
        rule = f"metrics are a dict of names and numbers (got {name!r}: a {type(value).__name__})"
        raise SystemFailure("bad_metrics", f"{rule}; leave it out, or make it a float") from error
