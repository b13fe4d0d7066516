"""Configuration of what a run leaves behind. No torch here."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.config.base import Config


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
