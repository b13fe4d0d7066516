"""Headrace: asynchronous reinforcement learning for language models.

Neither side waits, and every token knows where it came from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # What `_LAZY` names, for type checkers and editors.
    from headrace.config.load import load_config as load_config
    from headrace.config.run import RunConfig as RunConfig
    from headrace.errors import EpisodeFailure as EpisodeFailure
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.orchestration.local import train as train
    from headrace.records import Batch as Batch
    from headrace.records import Episode as Episode
    from headrace.records import Group as Group
    from headrace.records import Task as Task
    from headrace.records import Turn as Turn
    from headrace.records import WeightVersion as WeightVersion
    from headrace.rollout.base import Completion as Completion
    from headrace.rollout.base import Environment as Environment
    from headrace.rollout.base import Policy as Policy
    from headrace.scoring.base import Attempt as Attempt
    from headrace.scoring.base import AttemptTurn as AttemptTurn
    from headrace.scoring.base import Score as Score
    from headrace.scoring.base import Scorer as Scorer

__version__ = "0.1.0"

_LAZY = {
    "train": "headrace.orchestration.local:train",
    "RunConfig": "headrace.config.run:RunConfig",
    "load_config": "headrace.config.load:load_config",
    "Task": "headrace.records:Task",
    "Turn": "headrace.records:Turn",
    "Episode": "headrace.records:Episode",
    "Group": "headrace.records:Group",
    "Batch": "headrace.records:Batch",
    "WeightVersion": "headrace.records:WeightVersion",
    "Environment": "headrace.rollout.base:Environment",
    "Policy": "headrace.rollout.base:Policy",
    "Completion": "headrace.rollout.base:Completion",
    "Scorer": "headrace.scoring.base:Scorer",
    "Attempt": "headrace.scoring.base:Attempt",
    "AttemptTurn": "headrace.scoring.base:AttemptTurn",
    "Score": "headrace.scoring.base:Score",
    "EpisodeFailure": "headrace.errors:EpisodeFailure",
    "HeadraceError": "headrace.errors:HeadraceError",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import on first use: `import headrace` and `headrace --help` stay fast and load no torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
