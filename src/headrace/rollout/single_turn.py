"""The environment of one question and one answer."""

from __future__ import annotations

from typing import Any

from headrace.records import Task
from headrace.rollout.base import Policy


class SingleTurn:
    """Shows the task's prompt to the policy and takes its answer.

    A text prompt goes to the model as it is, or, with `chat`, as a user's message. Messages always go through
    the model's chat template. `system` is put before them.
    """

    def __init__(self, chat: bool = False, system: str | None = None):
        self._chat = chat
        self._system = system

    async def rollout(self, task: Task, policy: Policy) -> None:
        await policy.sample(self.prompt(task))

    def prompt(self, task: Task) -> str | list[dict[str, Any]]:
        """What the policy is shown."""
        prompt = task.prompt
        if isinstance(prompt, str) and (self._chat or self._system):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str) and self._system:
            prompt = [{"role": "system", "content": self._system}, *prompt]
        return prompt
