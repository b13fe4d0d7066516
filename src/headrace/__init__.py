"""Headrace: asynchronous reinforcement learning for language models.

Neither side waits, and every token knows where it came from.
"""

from __future__ import annotations

from typing import Any

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
    "Scorer": "headrace.scoring.base:Scorer",
    "Attempt": "headrace.scoring.base:Attempt",
    "Score": "headrace.scoring.base:Score",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    """Import on first use: `import headrace` and `headrace --help` stay fast and load no torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name].split(":")
    return getattr(import_module(module), attribute)
