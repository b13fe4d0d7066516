"""Scorers in worker processes: the worker's side, the controller's side, and what passes between."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.bounds import checked_metrics
from headrace.errors import EpisodeFailure
from headrace.records import Episode, Record, Task, message, text_before
from headrace.scoring.base import Attempt, AttemptTurn
from headrace.scoring.config import ScorerConfig
from headrace.scoring.weighted import open_scorer, scored
from headrace.tokenizer import Tokenizer
from headrace.workers import AskController, Pool, serve


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
        self._score = open_scorer(config)

    async def handle(self, body: Any, ask: AskController) -> ScoreReply:
        assert isinstance(body, ScoreCall)
        score = await scored(self._score, body.task, self._attempt(body))
        return ScoreReply(reward=score.reward, metrics=checked_metrics(score.metrics))

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
