r"""A scorer of one's own: most of the reward for the right answer, the rest for work that is shown and right.

    headrace train examples/quickstart/quickstart.toml \
        --set scorer.source=examples/my_scorer.py:score --run runs/mine

A function of the task and the attempt, or a class with such a method `score`. The configuration's scorer.options
become keyword arguments (here for_work); the numbers beside the reward are kept with the episode.
"""

from __future__ import annotations

from itertools import accumulate

from headrace import Attempt, Score, Task


def score(task: Task, attempt: Attempt, for_work: float = 0.2) -> Score:
    work, equals, answer = attempt.text.partition("=")
    right = attempt.stop == "stop" and bool(equals) and answer.strip() == task.answer
    turns = [int(word) for word in str(task.prompt).split() if word.startswith("+")]
    expected = [str(total % 10) for total in accumulate(turns)]
    shown = [said == wanted for said, wanted in zip(work.split(), expected, strict=False)]
    correct = sum(shown) / len(expected)
    return Score((1 - for_work) * right + for_work * correct, {"right": float(right), "work": correct})
