"""How many training episodes fail, why, and when that is worth telling."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from headrace.bounds import clip

TOLD_FROM = 0.05
"""A share of failures from which on it is told."""
HEALTHY = 0.1
"""The largest share without an alarm that is on; one begins at ALARMING."""
ALARMING = 0.25
FEWEST = 16
"""Episodes before which nothing is told."""
CHANGE = 0.1
"""What the share has moved by when it is told again."""
MAX_DETAIL = 200
"""Characters of an example's detail."""
NOT_FAILURES = frozenset(
    {
        "equal_rewards",
        "group_below_minimum",
        "late",
        "lost_in_crash",
        "lost_with_ledger",
        "orphaned_by_restore",
        "run_finished",
        "shutdown",
    }
)
"""Reasons for drops that are not an episode's own."""

Event = tuple[str, dict[str, Any]]
"""Kind and fields."""


class FailureWatch:
    """Looks on as training episodes end. Not thread-safe."""

    def __init__(self, window: int):
        """`window`: the share is that of so many last episodes."""
        self._window = window
        self._last: deque[str | None] = deque()
        """Their reasons; None of one that succeeded."""
        self._reasons: Counter[str] = Counter()
        """The same, counted."""
        self._details: dict[str, str] = {}
        """The newest of each reason in the window."""
        self._told: tuple[float, str] | None = None
        """The share and the reason that were told last."""
        self._since_told = 0
        self._alarm = False
        self._ended = self._failed = 0
        """Since the step before."""

    def ended(self, reason: str | None, detail: str = "") -> list[Event]:
        """An episode has: with its failure, or None. What there is to tell now."""
        if reason in NOT_FAILURES:
            return []
        self._ended += 1
        self._since_told += 1
        self._last.append(reason)
        if reason is not None:
            self._failed += 1
            self._reasons[reason] += 1
            self._details[reason] = clip(detail, MAX_DETAIL)
        if len(self._last) > self._window:
            self._forget(self._last.popleft())
        if len(self._last) < min(FEWEST, self._window):
            return []
        return [*self._share_events(), *self._alarm_events()]

    def take_frac(self) -> float | None:
        """The share that failed of the episodes that have ended since this was asked last; None where none has."""
        ended, failed = self._ended, self._failed
        self._ended = self._failed = 0
        return failed / ended if ended else None

    @property
    def _share(self) -> float:
        return self._reasons.total() / len(self._last)

    def _forget(self, reason: str | None) -> None:
        if reason is not None:
            self._reasons[reason] -= 1
            if not self._reasons[reason]:
                del self._reasons[reason], self._details[reason]

    def _share_events(self) -> list[Event]:
        share, now = self._share, self._commonest()
        if self._told is None:
            due = share >= TOLD_FROM
        elif share < TOLD_FROM / 2:
            self._told, self._since_told = None, 0
            return [("failing", now)]
        else:
            moved = abs(share - self._told[0]) >= CHANGE or now["commonest"] != self._told[1]
            due = moved and self._since_told >= self._window
        if not due:
            return []
        self._told, self._since_told = (share, now["commonest"]), 0
        return [("failing", now)]

    def _alarm_events(self) -> list[Event]:
        share = self._share
        if self._alarm == (share >= (HEALTHY if self._alarm else ALARMING)):
            return []
        self._alarm = not self._alarm
        now = self._commonest()
        fields = {"metric": "failed_frac", "value": share, "low": 0.0, "high": HEALTHY, "on": self._alarm}
        return [("alarm", {**fields, **now, "advice": advice(now["commonest"])})]

    def _commonest(self) -> dict[str, Any]:
        """The share of failures and the commonest reason, with an example."""
        [(reason, count)] = self._reasons.most_common(1) or [("", 0)]
        of = len(self._last)
        return {
            "share": self._share,
            "episodes": of,
            "commonest": reason,
            "commonest_share": count / of,
            "example": self._details.get(reason, ""),
        }


def told(fields: Mapping[str, Any], limit: int = MAX_DETAIL) -> str:
    """90% of the last 160 episodes, scorer_error 88%: KeyError: 'answer'."""
    text = f"{fields['share']:.0%} of the last {fields['episodes']:,} episodes"
    if not fields["commonest"]:
        return text
    text += f", {fields['commonest']}"
    text += "" if fields["commonest_share"] == fields["share"] else f" {fields['commonest_share']:.0%}"
    return f"{text}: {clip(fields['example'], limit)}" if fields["example"] else text


def advice(reason: str) -> str:
    """What to look at first, in a sentence without its end."""
    who, _, how = reason.partition("_")
    if who in ("scorer", "environment"):
        if how == "timeout":
            return f"raise {who}.timeout_s or {who}.workers, or make the {who} faster"
        if how == "crash":
            return f"logs/{who}-0.log and those beside it have what its process printed"
        if how == "error":
            return f"mend the code of {who}.source; events.jsonl has each episode's error"
    return _ADVICE.get(reason, "docs/tasks.md tells what the reason means, events.jsonl has each episode's detail")


_ADVICE = {
    "prompt_too_long": "raise engine.max_context, or give shorter prompts",
    "too_many_samples": "raise environment.max_samples, or ask for fewer turns at once",
    "chat_template": "give messages that the model's chat template can render",
    "bad_reward": "have the scorer return numbers of at most ±1e12",
    "bad_turn": "the engine computes what cannot be right: try engine.numerics or another dtype",
}


def training_warning(ledger: Mapping[str, Any]) -> str | None:
    """What to know about a finished run's ledger when more than TOLD_FROM of its episodes failed."""
    failed = {reason: count for reason, count in ledger["dropped"].items() if reason not in NOT_FAILURES}
    total, admitted = sum(failed.values()), ledger["admitted"]
    if not admitted or total / admitted < TOLD_FROM:
        return None
    reasons = ", ".join(
        f"{reason} {count:,}" for reason, count in sorted(failed.items(), key=lambda item: -item[1])
    )
    return f"{total / admitted:.0%} of {admitted:,} training episodes failed ({reasons})"
