"""The quickstart's task: a dial with ten numbers stands at 0 and is turned several times. Where does it stand?

    prompt      +7 +5 +9 +2 . . . . . . . . ?     (the dots fill up to twelve turns)
    lazy        = 3                               answers at once, and is mostly wrong: too much for a small head
    thinking    7 2 1 3 = 3                       says where the dial stands after each turn, then answers

The model starts out lazy four times out of five. Nobody tells it to think; the reward does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace import Attempt, Task

TURNS = range(4, 13)
HELD_OUT = 1000
WORDS = ["?", "=", ".", *map(str, range(10)), *(f"+{turn}" for turn in range(1, 10))]


def draw(dice: random.Random) -> tuple[int, ...]:
    return tuple(dice.randint(1, 9) for _ in range(dice.choice(TURNS)))


def prompt(turns: tuple[int, ...]) -> str:
    return " ".join([*(f"+{turn}" for turn in turns), *["."] * (TURNS[-1] - len(turns)), "?"])


def answer(turns: tuple[int, ...]) -> str:
    return str(sum(turns) % 10)


def lazy(turns: tuple[int, ...]) -> str:
    return f"= {answer(turns)}"


def thinking(turns: tuple[int, ...]) -> str:
    return " ".join(answer(turns[: i + 1]) for i in range(len(turns))) + " " + lazy(turns)


def held_out() -> list[tuple[int, ...]]:
    dice = random.Random("held out")
    return list(dict.fromkeys(draw(dice) for _ in range(2 * HELD_OUT)))[:HELD_OUT]


def unseen(seed: int) -> Iterator[tuple[int, ...]]:
    """Endless examples, none of them held out."""
    dice, kept = random.Random(seed), set(held_out())
    while True:
        turns = draw(dice)
        if turns not in kept:
            yield turns


def training_tasks(count: int = 20_000, seed: int = 0) -> Iterator[Task]:
    for number, turns in zip(range(count), unseen(seed), strict=False):
        yield Task(id=f"train-{number}", prompt=prompt(turns), answer=answer(turns))


def held_out_tasks() -> Iterator[Task]:
    for number, turns in enumerate(held_out()):
        yield Task(id=f"held-out-{number}", prompt=prompt(turns), answer=answer(turns))


def score(task: Task, attempt: Attempt) -> float:
    """1 if the completion ended by itself and what follows its one "=" is right."""
    parts = attempt.text.split("=")
    return float(attempt.stop == "stop" and len(parts) == 2 and parts[1].strip() == task.answer)
