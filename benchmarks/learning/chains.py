"""The learning study's task: where does a chain of moves lead?

    prompt      m17 m204 m3 m88 . . ? 14        (dots fill up to the longest chain)
    lazy        = 30                            answers at once, and is mostly wrong
    thinking    8 11 28 6 = 6                   says the place after each move, then answers

Each of 300 moves leads from each of 61 places to some place, as was drawn once: 18,300 facts that have to be known
by heart. Chains have 4 to 12 moves. A wrong place on the way spoils the answer, so a policy has two things to
learn: to think, and the facts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

from headrace import Attempt, Task

PLACES, MOVES, LEAST, MOST = 61, 300, 4, 12
WORDS = ["?", "=", ".", *map(str, range(PLACES)), *(f"m{move}" for move in range(MOVES))]
HELD_OUT = 2000

Chain = tuple[int, tuple[int, ...]]
"""The first place, and moves."""


@cache
def leads() -> list[list[int]]:
    """For each move, where it leads from each place: no two to the same."""
    dice = random.Random("moves")
    return [dice.sample(range(PLACES), PLACES) for _ in range(MOVES)]


def draw(dice: random.Random, skew: float = 1.0) -> Chain:
    """All moves are as likely, or with more skew the first ones likelier."""
    moves = (int(MOVES * dice.random() ** skew) for _ in range(dice.randint(LEAST, MOST)))
    return dice.randrange(PLACES), tuple(moves)


def prompt(chain: Chain) -> str:
    first, moves = chain
    return " ".join([*(f"m{move}" for move in moves), *["."] * (MOST - len(moves)), "?", str(first)])


def places(chain: Chain) -> list[int]:
    """After each move."""
    place, moves = chain
    return [place := leads()[move][place] for move in moves]


def answer(chain: Chain) -> str:
    return str(places(chain)[-1])


def lazy(chain: Chain) -> str:
    return f"= {answer(chain)}"


def thinking(chain: Chain) -> str:
    return " ".join(map(str, places(chain))) + " " + lazy(chain)


def held_out() -> list[Chain]:
    dice = random.Random("held out")
    return [draw(dice) for _ in range(HELD_OUT)]


def unseen(seed: int, skew: float = 1.0) -> Iterator[Chain]:
    """Endless chains, none of them held out."""
    dice, kept = random.Random(seed), set(held_out())
    while True:
        chain = draw(dice, skew)
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
    return float(attempt.stop == "end" and len(parts) == 2 and parts[1].strip() == task.answer)
