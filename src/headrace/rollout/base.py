"""The rollout room's interface: task in, episode out.

An environment is a user's class. It runs in a worker process and sees the model only through a `Policy`; each
`sample` is one turn of the episode, recorded with all its provenance by the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.engine.base import Sampler
from headrace.records import Episode, Sampling, Task


@dataclass(frozen=True)
class Completion:
    """What a policy answered. `turn` names it in later calls."""

    turn: int
    tokens: list[int]
    """As sampled, with those of an end token or a stop string."""
    text: str
    """Without special tokens, and without the stop string that ended it."""
    stop: str
    """"end": by an end token. "stop_string": by a stop string. "length": it has as many tokens as it may have."""
    stop_string: str | None = None
    """The one that ended it."""


class Policy(Protocol):
    """The model, as an environment sees it."""

    async def sample(
        self,
        prompt: str | Sequence[dict[str, Any]] | Sequence[int],
        *,
        after: Completion | None = None,
        at: int | None = None,
        hold: bool = False,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
    ) -> Completion:
        """One turn. `prompt` is text, chat messages, or tokens.

        With `after`, the turn continues that completion's sequence, token for token: `prompt` is only what
        comes between the two, if anything. With `at`, it continues only the completion's first `at` tokens: a
        fork, which may be taken many times. What is continued often is sampled with `hold`: the engine then keeps
        what it computed for it while the episode lasts and there is room, and a fork costs only new tokens.

        Sampling parameters that are given take the place of the environment's, for this turn. They may not be
        greedy (a temperature of 0): the turn is trained on.
        """
        ...


class Environment(Protocol):
    """Turns a task into an episode by sampling from the policy.

    `rollout` may be a coroutine function, or a plain function that gets a blocking policy and runs in a thread.
    What it returns, if anything, are numbers to keep with the episode. An exception fails this episode only.
    """

    async def rollout(self, task: Task, policy: Policy) -> dict[str, float] | None: ...


def episode_seed(seed: int, sequence: int, place: int) -> int:
    """The seed of an episode, of the run's seed, its group's number and its own place in the group."""
    return ((seed * 1_000_003 + sequence) * 1_000_003 + place) & 0x7FFF_FFFF_FFFF


def turn_seed(episode: int, call: int) -> int:
    """The seed of the turn that comes of an episode's call, counted from 0."""
    return (episode * 1_000_003 + call) & _SEEDS


def call_of(episode: int, seed: int) -> int:
    """The inverse: the call whose turn has this seed. Of another episode's seed a very large number."""
    return (seed - turn_seed(episode, 0)) & _SEEDS


_SEEDS = 0x7FFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run. `seed` names its random streams."""

    id: str
    task: Task
    seed: int
    engine: Sampler
    sampling: Sampling | None = None
    """Instead of the environment's own."""
    on_tokens: Callable[[int], None] = field(default=lambda count: None)
    """Told of tokens when they are received."""
    on_wasted: Callable[[int], None] = field(default=lambda count: None)
    """Told of received tokens that will not be part of the episode."""


class Rollouts(Protocol):
    """Runs episodes, many at once. A failed episode is data: it comes back with its reason."""

    async def run(self, request: EpisodeRequest) -> Episode: ...

    def cut(self, episode_id: str) -> None:
        """End a running episode now; it comes back failed, with the reason "late"."""
        ...

    def hold_clocks(self, held: bool) -> None:
        """While they are held, because engines sleep say, the time that episodes take does not count."""
        ...
