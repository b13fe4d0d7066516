from __future__ import annotations

import asyncio

import pytest

from headrace.records import Task
from headrace.rollout.single_turn import SingleTurn
from headrace.testing.fakes import ScriptedPolicy

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
USER = {"role": "user", "content": "2 + 2 ="}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("options", "prompt", "asked"),
    [
        ({}, "2 + 2 =", "2 + 2 ="),
        ({"chat": True}, "2 + 2 =", [USER]),
        ({"chat": True, "system": "Be brief."}, "2 + 2 =", [SYSTEM, USER]),
        ({"system": "Be brief."}, "2 + 2 =", [SYSTEM, USER]),
        ({}, MESSAGES, MESSAGES),
        ({"chat": True}, MESSAGES, MESSAGES),
        ({"system": "Be brief."}, MESSAGES, [SYSTEM, *MESSAGES]),
    ],
)
def test_the_policy_is_asked_once_with_the_prompt_as_text_or_messages(options, prompt, asked):
    policy = ScriptedPolicy("4")
    task = Task(id="0", prompt=prompt)
    assert asyncio.run(SingleTurn(**options).rollout(task, policy)) is None
    assert policy.asked == [asked]
    assert task.prompt == prompt
