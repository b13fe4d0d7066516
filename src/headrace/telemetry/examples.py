"""A few episodes of a step, for people to read beside its curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.bounds import clip
from headrace.records import Batch, Episode

MAX_TEXT = 4000
"""Characters of one prompt, answer or completion that are shown."""


class Example(NamedTuple):
    """One episode, as it is shown."""

    step: int
    episode: str
    reward: float
    advantage: float
    prompt: str
    completion: str
    answer: str
    metrics: dict[str, float]


def examples_of(batch: Batch, count: int, decode: Callable[[list[int]], str]) -> list[Example]:
    """At most `count` of a batch, from the worst reward to the best at equal distances."""
    pairs = zip(batch.episodes, batch.advantages.tolist(), strict=True)
    ranked = sorted(pairs, key=lambda pair: pair[0].reward or 0.0)
    count = min(count, len(ranked))
    last = len(ranked) - 1
    places = [last] if count == 1 else [round(i * last / (count - 1)) for i in range(count)]
    return [_example(batch.step, *ranked[place], decode) for place in places]


def _example(step: int, episode: Episode, advantage: float, decode: Callable[[list[int]], str]) -> Example:
    prompt = episode.task.prompt
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in prompt)
    return Example(
        step=step,
        episode=episode.id,
        reward=episode.reward or 0.0,
        advantage=advantage,
        prompt=clip(prompt, MAX_TEXT),
        completion=clip("\n".join(decode(turn.tokens.tolist()) for turn in episode.turns), MAX_TEXT),
        answer=clip(episode.task.answer or "", MAX_TEXT),
        metrics=episode.metrics,
    )


def as_markdown(example: Example) -> str:
    """For TensorBoard: a line of numbers, then the texts, word for word."""
    numbers = {"reward": example.reward, "advantage": example.advantage, **example.metrics}
    head = f"**{example.episode}**: " + ", ".join(f"{_inline(name)} {value:.4g}" for name, value in numbers.items())
    parts = [("prompt", example.prompt), ("completion", example.completion), ("answer", example.answer)]
    return "\n\n".join([head, *(f"{name}\n\n{_block(text)}" for name, text in parts if text)])


def _inline(name: str) -> str:
    return "".join(char if char.isalnum() or char in " .-/" else f"\\{char}" for char in name)


def _block(text: str) -> str:
    """An indented block: nothing within it is markup."""
    return "\n".join("    " + line for line in text.splitlines())
