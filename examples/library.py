"""A run from Python: the quickstart's configuration with an environment and a scorer that are defined here.

    python examples/quickstart/prepare.py runs/quickstart-model
    python examples/library.py [KEY=VALUE ...]          from the repository's root; leaves runs/library

A run begins in a folder of its own: to run it again, remove that one or choose another with name=NAME.
"""

from __future__ import annotations

import sys

import headrace
from headrace import Attempt, Policy, Task


class LastCall:
    """A completion that runs out of tokens gets two more, for its answer."""

    async def rollout(self, task: Task, policy: Policy) -> None:
        first = await policy.sample(task.prompt, max_tokens=10)
        if first.stop == "length":
            await policy.sample("=", after=first, max_tokens=2)


def last_word(task: Task, attempt: Attempt) -> float:
    return float(attempt.text.split()[-1:] == [task.answer])


# Worker processes import this file to find the two: only the script itself may start a run.
if __name__ == "__main__":
    overrides = ["name=library", "training.steps=60", *sys.argv[1:]]
    config = headrace.load_config("examples/quickstart/quickstart.toml", overrides)
    summary = headrace.train(config, environment=LastCall, scorer=last_word)
    print(f"accuracy {summary['eval_before']:.2f} → {summary['eval_after']:.2f}")
    print(f"no token more than {summary['staleness_max']} versions old; episodes: {summary['ledger']}")
