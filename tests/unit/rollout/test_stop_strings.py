"""Environments and scorers see a turn's text without the stop string that ended it, and its tokens as sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.records import Task
from headrace.rollout.config import EnvironmentConfig
from headrace.rollout.worker import SampleCall, SampleReply, _WorkerPolicy
from headrace.scoring.base import Attempt
from headrace.scoring.config import ScorerConfig
from headrace.scoring.worker import ScoreCall, ScoreTurn, _Scoring

TOKENS = np.array([3, 1, 4], np.int32)


class Numbers:
    """A tokenizer for which text is numbers."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: Any, *, keep_special: bool = False) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize(
    ("stop", "stop_string", "text"),
    [("end", None, "3 1 4"), ("length", None, "3 1 4"), ("stop_string", " 1", "3"), ("stop_string", "4", "3 1 ")],
)
def test_an_environment_and_a_scorer_see_the_text_before_the_stop_string(stop, stop_string, text):
    async def ask(call: SampleCall) -> SampleReply:
        assert call.stop_strings == ("4", " 1")
        return SampleReply(turn=0, tokens=TOKENS, stop=stop, stop_string=stop_string)

    policy = _WorkerPolicy(EnvironmentConfig(stop_strings=("4",)), Numbers(), ask)
    found = asyncio.run(policy.sample("2", stop=[" 1"]))
    assert (found.text, found.tokens, found.stop, found.stop_string) == (text, [3, 1, 4], stop, stop_string)
    seen: list[Attempt] = []
    scoring = _Scoring(ScorerConfig(), Numbers())

    async def note(task: Task, attempt: Attempt) -> float:
        seen.append(attempt)
        return 1.0

    scoring._score = note
    turn = ScoreTurn(context=TOKENS[:1], tokens=TOKENS, stop=stop, stop_string=stop_string)
    asyncio.run(scoring.handle(ScoreCall(task=Task(id="t", prompt="2"), turns=(turn,), metrics={}), ask))
    [attempt] = seen
    assert (attempt.text, attempt.stop) == (text, stop)
    assert (attempt.turns[0].tokens, attempt.turns[0].stop_string) == ([3, 1, 4], stop_string)
