"""The scoring room's interface: episode in, reward out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from headrace.records import Episode, Task


class Overlong(NamedTuple):
    """How long episodes are punished: from `limit` − `buffer` sampled tokens on, with all of it at `limit`."""

    limit: int
    buffer: int
    penalty: float


Truncated = Literal["train", "exclude", "baseline_only"]


class Comparison(NamedTuple):
    """How rewards become advantages. The fields are the keywords of `advantages`, which explains them."""

    baseline: Literal["group", "others", "none"] = "group"
    scale: Literal["group", "batch", "none"] = "group"
    over: Literal["episodes", "tokens"] = "episodes"
    unbiased: bool = False
    eps: float = 1e-6
    truncated: Truncated = "train"
    overlong: Overlong | None = None


@dataclass(frozen=True)
class AttemptTurn:
    """One turn as a scorer sees it."""

    prompt: str
    text: str
    """Without special tokens, and without the stop string that ended it."""
    tokens: list[int]
    """As sampled."""
    stop: str
    """"end": by an end token. "stop_string": by a stop string. "length": it has as many tokens as it may have."""
    stop_string: str | None = None
    """The one that ended it."""


@dataclass(frozen=True)
class Attempt:
    """An episode as a scorer sees it."""

    turns: list[AttemptTurn]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last turn's answer, without special tokens and stop string."""
        return self.turns[-1].text if self.turns else ""

    @property
    def stop(self) -> str:
        """Why the last turn ended: "end", "stop_string" or "length"."""
        return self.turns[-1].stop if self.turns else ""


@dataclass(frozen=True)
class Score:
    """A reward, and numbers to keep with the episode."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """Gives an attempt its reward. `score` may be a coroutine function; a plain one runs in a thread.

    A function with this signature is a scorer too. An exception fails this episode only.
    """

    def score(self, task: Task, attempt: Attempt) -> float | Score: ...


class Scorers(Protocol):
    """Scores episodes, many at once. One whose scorer fails comes back failed, with its reason."""

    async def score(self, episode: Episode) -> Episode: ...
