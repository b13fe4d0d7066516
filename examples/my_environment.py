r"""An environment of one's own: after a wrong answer the model is asked once more, in the same sequence.

    headrace train examples/quickstart/quickstart.toml --set engine.max_context=64 \
        --set environment.source=examples/my_environment.py:SecondChance --run runs/second-chance

Each `sample` is one turn of the episode. With `after`, a turn continues that completion's own tokens: no text is
tokenised again, and both turns are trained on. The numbers returned are kept with the episode.
"""

from __future__ import annotations

from headrace import Policy, Task


class SecondChance:
    def __init__(self, question: str = "?"):
        self._question = question

    async def rollout(self, task: Task, policy: Policy) -> dict[str, float]:
        first = await policy.sample(task.prompt)
        right = first.text.split()[-1:] == [task.answer]
        if not right:
            await policy.sample(self._question, after=first)
        return {"first_right": float(right)}
