"""The learning study's task: what becomes of a number by a chain of operations, modulo 31?

    prompt      *5 -28 *11 +9 . . ? 14          (dots fill up to the longest chain)
    lazy        = 30                            answers at once, and is mostly wrong
    thinking    8 11 28 6 = 6                   says the number after each operation, then answers

Chains have 4 to 12 operations. A wrong number on the way spoils the answer, so a policy has two things to learn: to
think, and to make fewer mistakes in each of up to twelve operations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from headrace import Attempt, Task

MODULUS, LEAST, MOST = 31, 4, 12
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
WORDS = ["?", "=", ".", *(f"{o}{n}" for o in OPERATIONS for n in range(2, MODULUS)), *map(str, range(MODULUS))]
HELD_OUT = 2000

Chain = tuple[int, tuple[tuple[str, int], ...]]
"""The first number, and operations with theirs."""


def draw(dice: random.Random) -> Chain:
    steps = ((dice.choice(list(OPERATIONS)), dice.randrange(2, MODULUS)) for _ in range(dice.randint(LEAST, MOST)))
    return dice.randrange(MODULUS), tuple(steps)


def prompt(chain: Chain) -> str:
    first, steps = chain
    asked = [f"{operation}{number}" for operation, number in steps]
    return " ".join([*asked, *["."] * (MOST - len(steps)), "?", str(first)])


def numbers(chain: Chain) -> list[int]:
    """After each operation."""
    value, steps = chain
    found = []
    for operation, number in steps:
        value = OPERATIONS[operation](value, number) % MODULUS
        found.append(value)
    return found


def answer(chain: Chain) -> str:
    return str(numbers(chain)[-1])


def lazy(chain: Chain) -> str:
    return f"= {answer(chain)}"


def thinking(chain: Chain) -> str:
    return " ".join(map(str, numbers(chain))) + " " + lazy(chain)


def held_out() -> list[Chain]:
    dice = random.Random("held out")
    return [draw(dice) for _ in range(HELD_OUT)]


def unseen(seed: int) -> Iterator[Chain]:
    """Endless chains, none of them held out."""
    dice, kept = random.Random(seed), set(held_out())
    while True:
        chain = draw(dice)
        if chain not in kept:
            yield chain


def training_tasks(count: int = 50_000, seed: int = 0) -> Iterator[Task]:
    for number, chain in zip(range(count), unseen(seed), strict=False):
        yield Task(id=f"train-{number}", prompt=prompt(chain), answer=answer(chain))


def held_out_tasks() -> Iterator[Task]:
    for number, chain in enumerate(held_out()):
        yield Task(id=f"held-out-{number}", prompt=prompt(chain), answer=answer(chain))


def score(task: Task, attempt: Attempt) -> float:
    """1 if the completion ended by itself and what follows its one "=" is right, however it got there."""
    parts = attempt.text.split("=")
    return float(attempt.stop == "stop" and len(parts) == 2 and parts[1].strip() == task.answer)
