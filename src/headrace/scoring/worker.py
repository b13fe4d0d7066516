"""Scorers in worker processes: the worker's side, the controller's side, and what passes between."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.bounds import SystemFailure, checked_metrics, text_of
from headrace.errors import EpisodeFailure, quoted
from headrace.records import Episode, Record, Task, message, text_before
from headrace.references import made, resolve
from headrace.scoring.base import Attempt, AttemptTurn, Score
from headrace.scoring.config import ScorerConfig
from headrace.tokenizer import Tokenizer
from headrace.workers import AskController, Pool, call_user, serve

MAX_ABS_REWARD = 1e12
"""Larger rewards are rejected: they are mistakes, and their advantages would overflow."""


class ScoreTurn(Record):
    context: np.ndarray
    tokens: np.ndarray
    stop: str
    stop_string: str | None = None


@message
class ScoreCall(Record):
    task: Task
    turns: tuple[ScoreTurn, ...]
    metrics: dict[str, float]


@message
class ScoreReply(Record):
    reward: float
    metrics: dict[str, float]


def start(sock: socket.socket, options: dict[str, Any]) -> None:
    """A worker's entry."""
    config = msgspec.convert(options["scorer"], ScorerConfig)
    scoring = _Scoring(config, Tokenizer(Path(options["model"])))
    serve(sock, scoring.handle, kind="scorer", threads=config.concurrency)


class _Scoring:
    def __init__(self, config: ScorerConfig, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        found: Any = resolve(config.source)
        self._score: Callable[..., Any]
        if inspect.isclass(found):
            self._score = made(found, config.options, config.source, "scorer").score
        else:
            self._score = partial(found, **config.options) if config.options else found

    async def handle(self, body: Any, ask: AskController) -> ScoreReply:
        assert isinstance(body, ScoreCall)
        result = await call_user(self._score, body.task, self._attempt(body))
        score = result if isinstance(result, Score) else Score(result)
        return ScoreReply(reward=reward_of(score.reward), metrics=checked_metrics(score.metrics))

    def _attempt(self, call: ScoreCall) -> Attempt:
        decode = self._tokenizer.decode
        turns = [
            AttemptTurn(
                prompt=decode(turn.context, keep_special=True),
                text=text_before(decode(turn.tokens), turn.stop_string),
                tokens=turn.tokens.tolist(),
                stop=turn.stop,
                stop_string=turn.stop_string,
            )
            for turn in call.turns
        ]
        return Attempt(turns=turns, metrics=call.metrics)


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


class WorkerScorers:
    """Scores episodes in a pool of workers."""

    def __init__(self, pool: Pool):
        self._pool = pool

    async def score(self, episode: Episode) -> Episode:
        turns = tuple(
            ScoreTurn(context=t.context, tokens=t.tokens, stop=t.stop, stop_string=t.stop_string)
            for t in episode.turns
        )
        try:
            reply = await self._pool.run(ScoreCall(task=episode.task, turns=turns, metrics=episode.metrics))
            metrics = checked_metrics(reply.metrics)
        except EpisodeFailure as failure:
            return episode.with_(failure=failure.reason, detail=failure.detail)
        return episode.with_(reward=reply.reward, metrics={**episode.metrics, **metrics})
