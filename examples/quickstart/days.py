"""The quickstart's task: which day is it after several leaps through the week?

    prompt      Wed +2 +3 +1 +4 +3 . . . . . ?     (the dots fill up to ten leaps)
    lazy        = Tue                              answers at once, and is mostly wrong: too much for a small head
    thinking    Fri Mon Tue Sat Tue = Tue          says the day after each leap, then answers

The model starts out lazy nine times out of ten. Nobody tells it to think; the reward does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from headrace import Attempt, Task

DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
LEAPS, MOST = range(1, 7), 10
WORDS = ["?", "=", ".", *DAYS, *(f"+{leap}" for leap in LEAPS)]
HELD_OUT = 1000

Riddle = tuple[int, ...]
"""The first day and then the leaps."""


def draw(dice: random.Random) -> Riddle:
    return (dice.randrange(7), *(dice.choice(LEAPS) for _ in range(dice.randint(3, MOST))))


def prompt(riddle: Riddle) -> str:
    first, *leaps = riddle
    return " ".join([DAYS[first], *(f"+{leap}" for leap in leaps), *["."] * (MOST - len(leaps)), "?"])


def answer(riddle: Riddle) -> str:
    return DAYS[sum(riddle) % 7]


def lazy(riddle: Riddle) -> str:
    return f"= {answer(riddle)}"


def thinking(riddle: Riddle) -> str:
    return " ".join(answer(riddle[: i + 1]) for i in range(1, len(riddle))) + " " + lazy(riddle)


def held_out() -> list[Riddle]:
    dice = random.Random("held out")
    return list(dict.fromkeys(draw(dice) for _ in range(2 * HELD_OUT)))[:HELD_OUT]


def unseen(seed: int) -> Iterator[Riddle]:
    """Endless riddles, none of them held out."""
    dice, kept = random.Random(seed), set(held_out())
    while True:
        riddle = draw(dice)
        if riddle not in kept:
            yield riddle


def training_tasks(count: int = 10_000, seed: int = 0) -> Iterator[Task]:
    for number, riddle in zip(range(count), unseen(seed), strict=False):
        yield Task(id=f"train-{number}", prompt=prompt(riddle), answer=answer(riddle))


def held_out_tasks() -> Iterator[Task]:
    for number, riddle in enumerate(held_out()):
        yield Task(id=f"held-out-{number}", prompt=prompt(riddle), answer=answer(riddle))


def score(task: Task, attempt: Attempt) -> float:
    """1 if the completion ended by itself and what follows its one "=" is right, however it got there."""
    parts = attempt.text.split("=")
    return float(attempt.stop == "end" and len(parts) == 2 and parts[1].strip() == task.answer)


async def patient_score(task: Task, attempt: Attempt, wait_s: float = 0.3) -> float:
    """The same after a while, as from a judge behind a network: the wait that asynchrony hides."""
    await asyncio.sleep(wait_s)
    return score(task, attempt)
