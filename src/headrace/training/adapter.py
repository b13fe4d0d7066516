"""A LoRA adapter as plain data: its description, and the modules that its targets mean. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.errors import ConfigError
from headrace.sync.base import AdapterSpec
from headrace.training.config import LoraConfig

NAME = "policy"
"""What the one adapter of a run is called."""


def adapter_spec(config: LoraConfig) -> AdapterSpec:
    return AdapterSpec(name=NAME, rank=config.rank, alpha=config.alpha, targets=config.targets)


def bound_modules(targets: Iterable[str], projections: Collection[str], others: Collection[str]) -> list[str]:
    """The projections that get an adapter, in their order.

    A target means each module whose name it is, or ends with after a dot, as PEFT has it. Raises ConfigError for
    one that means none of the `projections`, or one of the `others`, which cannot have an adapter.
    """
    bound: set[str] = set()
    for target in targets:
        known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in projections}))
        if refused := [name for name in others if _means(target, name)]:
            raise ConfigError(
                "training.lora.targets names projections of the model's layers; the embedding, the output head and"
                " modules that are no projections cannot have an adapter",
                f"{target!r}, which means {refused[0]}",
                f"leave it out; there are {known}",
            )
        meant = [name for name in projections if _means(target, name)]
        if not meant:
            raise ConfigError(
                "each of training.lora.targets is a projection of the model, or the adapter would bind to nothing",
                target,
                f"there are {known}",
            )
        bound.update(meant)
    return [name for name in projections if name in bound]


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith("." + target)
