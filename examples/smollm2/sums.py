"""Sums for a small chat model that can chat and can hardly add.

question    What is 19 + 3 + 8? Reply with the number only.
answer      30
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from headrace import Attempt, Score, Task

HELD_OUT = 400

Numbers = tuple[int, ...]


def draw(dice: random.Random, largest: int) -> Numbers:
    return tuple(dice.randint(1, largest) for _ in range(dice.choice((2, 3))))


def held_out(largest: int) -> list[Numbers]:
    """No two of them have the same numbers in any order."""
    dice = random.Random("held out")
    found: dict[Numbers, Numbers] = {}
    while len(found) < HELD_OUT:
        numbers = draw(dice, largest)
        found.setdefault(tuple(sorted(numbers)), numbers)
    return list(found.values())


def task(name: str, numbers: Numbers) -> Task:
    question = f"What is {' + '.join(map(str, numbers))}? Reply with the number only."
    return Task(id=name, prompt=[{"role": "user", "content": question}], answer=str(sum(numbers)))


def training_tasks(largest: int, count: int = 10_000, seed: int = 0) -> Iterator[Task]:
    """None has the numbers of a held-out one, in any order."""
    dice, kept = random.Random(seed), {tuple(sorted(numbers)) for numbers in held_out(largest)}
    number = 0
    while number < count:
        numbers = draw(dice, largest)
        if tuple(sorted(numbers)) not in kept:
            yield task(f"train-{number}", numbers)
            number += 1


def held_out_tasks(largest: int) -> Iterator[Task]:
    for number, numbers in enumerate(held_out(largest)):
        yield task(f"held-out-{number}", numbers)


def score(task: Task, attempt: Attempt) -> Score:
    """1 if the last number in the answer is right, whatever stands around it.

    The metrics tell arithmetic from form: whether there is a number at all, and whether the answer ended by itself.
    """
    numbers = re.findall(r"\d+", attempt.text)
    right = bool(numbers) and numbers[-1] == task.answer
    return Score(float(right), {"number": float(bool(numbers)), "ended": float(attempt.stop == "end")})
