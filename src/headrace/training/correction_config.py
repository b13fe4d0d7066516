"""Corrections for tokens that an older policy sampled. Formulas: docs/off-policy.md. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError

Level = Literal["token", "turn", "sequence"]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeast1 = Annotated[float, Meta(ge=1)]


class TisConfig(Config, tag="tis", tag_field="type"):
    """Truncated importance sampling: a weight of min(ratio, cap)."""

    level: Level = "token"
    """What the ratio is of."""
    geometric: bool = False
    """Of a turn or sequence: the geometric mean of its tokens' ratios in place of their product."""
    cap: AtLeast1 = 2.0
    """The largest weight."""


class MisConfig(Config, tag="mis", tag_field="type"):
    """Masked importance sampling: the ratio is the weight where it lies within bounds, elsewhere 0. By tokens it is
    IcePop."""

    level: Level = "token"
    """What the ratio is of."""
    geometric: bool = False
    """Of a turn or sequence: the geometric mean of its tokens' ratios in place of their product."""
    low: NotNegative = 0.5
    """The least ratio that is kept, at most 1."""
    high: AtLeast1 = 5.0
    """The greatest ratio that is kept."""

    def check(self) -> None:
        _check_low(self)


class CispoConfig(Config, tag="cispo", tag_field="type"):
    """A weight of the ratio as it is in this update, held above 1 − low and below 1 + high, by tokens. The
    surrogate's own clip then has nothing to do: every token keeps its gradient."""

    low: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Weights are at least 1 − low."""
    high: Positive = 4.0
    """Weights are at most 1 + high."""


class ToprConfig(Config, tag="topr", tag_field="type"):
    """Where the advantage is negative a weight of min(ratio, 1), elsewhere 1."""

    level: Level = "sequence"
    """What the ratio is of."""
    geometric: bool = False
    """Of a turn or sequence: the geometric mean of its tokens' ratios in place of their product."""


class DecoupledConfig(Config, tag="decoupled", tag_field="type"):
    """Decoupled PPO: clipped against the proximal policy, weighted by its ratio to the one that sampled."""

    cap: AtLeast1 = 5.0
    """The largest weight."""
    proximal: Literal["step", "interpolated"] = "step"
    """`step`: the policy at the beginning of the step. `interpolated`: by versions, between it and the recorded."""


class RejectionConfig(Config, tag="rejection", tag_field="type"):
    """Turns or sequences whose geometric mean ratio lies outside of bounds have weight 0."""

    level: Literal["turn", "sequence"] = "sequence"
    """What the ratio is of."""
    low: NotNegative = 0.95
    """The least ratio that is kept, at most 1."""
    high: AtLeast1 = 1.05
    """The greatest ratio that is kept."""

    def check(self) -> None:
        _check_low(self)


class OpsmConfig(Config, tag="opsm", tag_field="type"):
    """Off-policy sequence masking: a sequence of negative advantage that the policy has moved away from by more
    than `delta` nats a token has weight 0."""

    delta: NotNegative = 0.01
    """Nats a token."""


class VersionDropConfig(Config, tag="version_drop", tag_field="type"):
    """Tokens, or turns or sequences with a token, of more than so many versions ago have weight 0."""

    max_lag: Annotated[int, Meta(ge=0)]
    """Versions."""
    level: Level = "token"
    """What is dropped where one of its tokens is older."""


class KimiConfig(Config, tag="kimi", tag_field="type"):
    """A squared log-ratio is added to the loss, as in Kimi k1.5's mirror descent, by tokens."""

    tau: Positive = 0.1
    """The term is tau / 2 times the squared log-ratio."""


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
OF_PROXIMAL = (TisConfig, MisConfig, ToprConfig, DecoupledConfig, RejectionConfig)
"""Those that look at the proximal policy."""


def check_corrections(corrections: tuple[Correction, ...]) -> None:
    """Raise ConfigError where they contradict each other."""
    weighing = [_name(one) for one in corrections if isinstance(one, WEIGHING)]
    if len(weighing) > 1:
        raise ConfigError(
            "at most one of training.corrections weighs tokens by their ratio, or it would count twice",
            ", ".join(weighing),
            "leave all but one out",
        )
    for one in corrections:
        if isinstance(one, TisConfig | MisConfig | ToprConfig) and one.geometric and one.level == "token":
            raise ConfigError(
                f"geometric is of the tokens of a turn or sequence, and the correction {_name(one)} is by tokens",
                "geometric = true",
                'set its level to "turn" or "sequence", or leave geometric out',
            )


def _name(correction: Correction) -> str:
    return str(correction.__struct_config__.tag)


def _check_low(correction: MisConfig | RejectionConfig) -> None:
    if correction.low > 1:
        raise ConfigError(
            f"the low bound of the correction {_name(correction)!r} is at most 1, or it drops what is on-policy",
            correction.low,
            "lower low",
        )
