"""Scorers that need no model: comparison, mathematics, and `reasoning-gym`'s own verifiers."""

from __future__ import annotations

import json
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
        if task.answer is None:
            raise ValueError(f"task {task.id} has no answer to compare with")
        found, wanted = self._answer(attempt.text), task.answer.strip()
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
            import reasoning_gym
        except ImportError:
            raise MissingExtra("reasoning-gym", "reasoning-gym") from None
        self._library: Any = reasoning_gym
        self._datasets: dict[str, Any] = {}
        self._pattern = re.compile(pattern, re.DOTALL) if pattern else None

    def score(self, task: Task, attempt: Attempt) -> float:
        recipe = task.data["reasoning_gym"]
        dataset = self._dataset(recipe)
        answer = attempt.text.strip()
        if self._pattern is not None:
            matches = self._pattern.findall(attempt.text)
            answer = matches[-1].strip() if matches else answer
        return float(dataset.score_answer(answer, dataset[recipe["index"]]))

    def _dataset(self, recipe: dict[str, Any]) -> Any:
        """The dataset a task came from, made again from its recipe: the same entries, by its seed."""
        key = json.dumps({name: value for name, value in recipe.items() if name != "index"}, sort_keys=True)
        if key not in self._datasets:
            options = {"size": recipe["size"], "seed": recipe["seed"], **recipe["options"]}
            self._datasets[key] = self._library.create_dataset(recipe["dataset"], **options)
        return self._datasets[key]
