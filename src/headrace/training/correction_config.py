"""Corrections for tokens that an older policy sampled. Formulas: docs/off-policy.md. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError

Level = Literal["token", "turn", "sequence"]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class TisConfig(Config, tag="tis", tag_field="type"):
    """Truncated importance sampling: a weight of min(ratio, cap)."""

    level: Level = "token"
    """What the ratio is of."""
    geometric: bool = False
    """Of a turn or sequence: the geometric mean of its tokens' ratios in place of their product."""
    cap: Positive = 2.0


class MisConfig(Config, tag="mis", tag_field="type"):
    """Masked importance sampling: the ratio is the weight where it lies within bounds, elsewhere 0. By tokens it is
    IcePop."""

    level: Level = "token"
    geometric: bool = False
    low: NotNegative = 0.5
    high: Positive = 5.0

    def check(self) -> None:
        _check_bounds(self.low, self.high)


class CispoConfig(Config, tag="cispo", tag_field="type"):
    """A weight of the ratio, held above 1 − low and below 1 + high, by tokens."""

    low: Annotated[float, Meta(gt=0, le=1)] = 1.0
    high: Positive = 4.0


class ToprConfig(Config, tag="topr", tag_field="type"):
    """Where the advantage is negative a weight of min(ratio, 1), elsewhere 1."""

    level: Level = "sequence"
    geometric: bool = False


class DecoupledConfig(Config, tag="decoupled", tag_field="type"):
    """Decoupled PPO: clipped against the proximal policy, weighted by its ratio to the one that sampled."""

    cap: Positive = 5.0
    """Of the weight."""
    proximal: Literal["step", "interpolated"] = "step"
    """`step`: the policy at the beginning of the step. `interpolated`: by versions, between it and the recorded."""


class RejectionConfig(Config, tag="rejection", tag_field="type"):
    """Turns or sequences whose geometric mean ratio lies outside of bounds have weight 0."""

    level: Literal["turn", "sequence"] = "sequence"
    low: NotNegative = 0.95
    high: Positive = 1.05

    def check(self) -> None:
        _check_bounds(self.low, self.high)


class OpsmConfig(Config, tag="opsm", tag_field="type"):
    """Off-policy sequence masking: a sequence of negative advantage that the policy has moved away from by more
    than `delta` nats a token has weight 0."""

    delta: NotNegative = 0.01


class VersionDropConfig(Config, tag="version_drop", tag_field="type"):
    """Tokens, or turns or sequences with a token, of more than so many versions ago have weight 0."""

    max_lag: Annotated[int, Meta(ge=0)]
    level: Level = "token"


class KimiConfig(Config, tag="kimi", tag_field="type"):
    """A squared log-ratio is added to the loss, as in Kimi k1.5's mirror descent, by tokens."""

    tau: Positive = 0.1


Correction = (
    TisConfig
    | MisConfig
    | CispoConfig
    | ToprConfig
    | DecoupledConfig
    | RejectionConfig
    | OpsmConfig
    | VersionDropConfig
    | KimiConfig
)
WEIGHING = (TisConfig, MisConfig, CispoConfig, ToprConfig, DecoupledConfig)
"""Those whose weight is an importance ratio."""


def check_corrections(corrections: tuple[Correction, ...]) -> None:
    """Raise ConfigError where they contradict each other."""
    weighing = [_name(one) for one in corrections if isinstance(one, WEIGHING)]
    if len(weighing) > 1:
        raise ConfigError(
            "at most one of training.corrections weighs tokens by their ratio, or it would count twice",
            ", ".join(weighing),
            "leave all but one out",
        )


def _name(correction: Correction) -> str:
    return str(correction.__struct_config__.tag)


def _check_bounds(low: float, high: float) -> None:
    if low >= high:
        raise ConfigError("a correction's low bound is below its high one", f"{low} >= {high}", "lower low")
