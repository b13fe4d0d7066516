"""Configuration of evaluations. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError
from headrace.rollout.config import SamplingConfig, TaskConfig

HELD_OUT = "held_out"
"""What the set in `evaluation.tasks` is called beside named ones."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class EvaluationSet(NamedTuple):
    """One set of tasks and how it is evaluated, with what it takes from all."""

    tasks: TaskConfig
    limit: int
    samples: int
    sampling: SamplingConfig
    failure_reward: float = 0.0
    max_failed: float = 0.1


class EvaluationSetConfig(Config):
    """A set of held-out tasks with a name of its own. What is left out is as `evaluation` has it."""

    tasks: TaskConfig
    limit: Annotated[int, Meta(ge=1)] | None = None
    """Most tasks of it evaluated. None: `evaluation.limit`."""
    samples: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Completions per task. None: `evaluation.samples`."""
    sampling: SamplingConfig | None = None
    """None: `evaluation.sampling`."""


class EvaluationConfig(Config):
    """Held-out tasks, sampled at intervals beside training, by an engine whose weights stand still meanwhile."""

    tasks: TaskConfig | None = None
    """None: no evaluation, unless there are `sets`."""
    limit: Annotated[int, Meta(ge=1)] = 500
    """Most tasks evaluated."""
    every: Annotated[int, Meta(ge=1)] = 50
    """Training steps between evaluations; the first comes before training, the last after it."""
    samples: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Completions per task; pass@1 to pass@samples are reported."""
    sampling: SamplingConfig = SamplingConfig()
    sets: dict[str, EvaluationSetConfig] = {}
    """Further sets of tasks, by name."""
    best: str | None = None
    """The set whose mean reward chooses checkpoints/best. None: `evaluation.tasks` ("held_out") where it is there,
    otherwise the first of `sets`."""
    max_failed: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Largest share of a set's completions that may fail for reasons that are not the policy's own; with more, the
    evaluation is invalid, and its version never the best."""
    failure_reward: float = 0.0
    """What a completion counts as that the policy itself made fail. Where wrong answers have negative rewards, give
    theirs."""

    @property
    def by_name(self) -> dict[str, EvaluationSet]:
        """All sets, the one that chooses the best first."""
        found = {} if self.tasks is None else {HELD_OUT: self._set(EvaluationSetConfig(tasks=self.tasks))}
        found |= {name: self._set(given) for name, given in self.sets.items()}
        first = self.best if self.best in found else next(iter(found), None)
        return dict(sorted(found.items(), key=lambda item: item[0] != first))

    def _set(self, given: EvaluationSetConfig) -> EvaluationSet:
        return EvaluationSet(
            tasks=given.tasks,
            limit=given.limit or self.limit,
            samples=given.samples or self.samples,
            sampling=given.sampling or self.sampling,
            failure_reward=self.failure_reward,
            max_failed=self.max_failed,
        )

    def check(self) -> None:
        for name in self.sets:
            if _NAME.fullmatch(name) is None or name == HELD_OUT:
                raise ConfigError(
                    f'a set of evaluation.sets is named with 1 to 64 letters, digits, - and _; "{HELD_OUT}" is the '
                    "name of evaluation.tasks",
                    name,
                    "choose another name",
                )
        known = [*([] if self.tasks is None else [HELD_OUT]), *self.sets]
        if self.best is not None and self.best not in known:
            raise ConfigError(
                "evaluation.best names one of the sets that are evaluated",
                self.best,
                f"choose among {', '.join(known)}" if known else "give evaluation.tasks, or leave it out",
            )
