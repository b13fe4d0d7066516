"""Scorers that need no model: comparison, mathematics, and `reasoning-gym`'s own verifiers."""

from __future__ import annotations

import re
from typing import Any

from headrace.errors import MissingExtra
from headrace.records import Task
from headrace.scoring.base import Attempt


class ExactMatch:
    """1 when the answer found in the attempt equals the task's, else 0.

    The answer is the last match of `pattern` (its first group if it has one), or the whole text without one;
    surrounding white space does not count.
    """

    def __init__(self, pattern: str | None = None, ignore_case: bool = False):
        self._pattern = re.compile(pattern) if pattern else None
        self._ignore_case = ignore_case

    def score(self, task: Task, attempt: Attempt) -> float:
        found, wanted = self._answer(attempt.text), (task.answer or "").strip()
        if found is not None and self._ignore_case:
            found, wanted = found.lower(), wanted.lower()
        return float(found == wanted)

    def _answer(self, text: str) -> str | None:
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        if not matches:
            return None
        last = matches[-1]
        found = last.group(1 if last.re.groups else 0)
        return None if found is None else found.strip()


class MathVerify:
    """1 when `math-verify` finds the attempt's answer mathematically equal to the task's, else 0."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError:
            raise MissingExtra("math-verify", "math") from None
        self._library: Any = math_verify

    async def score(self, task: Task, attempt: Attempt) -> float:
        # On the worker's main thread: the library's own time limits use signals.
        gold = self._library.parse(f"${task.answer}$")
        return float(self._library.verify(gold, self._library.parse(attempt.text)))


class ReasoningGym:
    """The reward that the task's own `reasoning-gym` dataset gives. For tasks of type "reasoning_gym"."""

    def __init__(self, pattern: str | None = r"<answer>(.*?)</answer>"):
        try:
            from reasoning_gym.factory import get_score_answer_fn
        except ImportError:
            raise MissingExtra("reasoning-gym", "reasoning-gym") from None
        self._verifier = get_score_answer_fn
        self._pattern = re.compile(pattern, re.DOTALL) if pattern else None

    def score(self, task: Task, attempt: Attempt) -> float:
        entry = task.data["reasoning_gym"]
        answer = attempt.text.strip()
        if self._pattern is not None:
            matches = self._pattern.findall(attempt.text)
            answer = matches[-1].strip() if matches else answer
        return float(self._verifier(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))
