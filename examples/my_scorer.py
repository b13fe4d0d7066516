r"""A scorer of one's own: most of the reward for the right answer, the rest for work that is shown and right.

    headrace train examples/quickstart/quickstart.toml \
        --set scorer.source=examples/my_scorer.py:score --run runs/mine

A function of the task and the attempt, or a class with such a method `score`. The configuration's scorer.options
become keyword arguments (here for_work); the numbers beside the reward are kept with the episode.
"""

from __future__ import annotations

from headrace import Attempt, Score, Task

DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]


def score(task: Task, attempt: Attempt, for_work: float = 0.2) -> Score:
    work, equals, answer = attempt.text.partition("=")
    right = attempt.stop == "end" and bool(equals) and answer.strip() == task.answer
    first, *words = str(task.prompt).split()
    leaps = [int(word) for word in words if word.startswith("+")]
    days = [DAYS[(DAYS.index(first) + sum(leaps[: i + 1])) % 7] for i in range(len(leaps))]
    correct = sum(said == day for said, day in zip(work.split(), days, strict=False)) / len(days)
    return Score((1 - for_work) * right + for_work * correct, {"right": float(right), "work": correct})
