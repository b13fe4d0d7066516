"""Configuration of what a run leaves behind. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config


class WandbConfig(Config):
    """Weights & Biases, beside the run's own files (`headrace[wandb]`)."""

    project: Annotated[str, Meta(min_length=1)] = "headrace"
    entity: str | None = None
    """User or team. None: wandb's own default."""
    name: str | None = None
    """The run's name there. None: that of its folder."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to RUN/wandb only; `wandb sync` sends it later."""


class RecordingConfig(Config):
    """What a run leaves in its folder besides the ledger and metrics."""

    episodes: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Fraction of the trained groups whose episodes are written to episodes/."""
    keep_versions_every: Annotated[int, Meta(ge=1)] = 25
    """Every so many steps, the weights of enough consecutive versions are kept to recompute episodes' log-probs
    with `headrace audit --recompute`."""
    keep_versions_gib: Annotated[float, Meta(ge=0)] = 2.0
    """Most disk space for those weights; once it is used, no further ones are kept. 0 keeps none."""
    tensorboard: bool = True
    wandb: WandbConfig | None = None
    examples: Annotated[int, Meta(ge=0, le=64)] = 4
    """Episodes of a step that TensorBoard and W&B get to read, from the worst reward to the best."""
    examples_every: Annotated[int, Meta(ge=1)] = 10
    """Training steps between such examples; the first step has some."""
