"""The algorithms a run chooses from, and what each comes down to. Formulas: docs/off-policy.md. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError
from headrace.scoring.base import Overlong

Clip = Annotated[float, Meta(gt=0, lt=1)]
ClipAbove = Annotated[float, Meta(gt=0)]
Aggregate = Literal["token", "sequence"]
StdEps = Annotated[float, Meta(gt=0, le=1)]


class Recipe(NamedTuple):
    """An algorithm, as advantages and losses see it."""

    baseline: Literal["group", "others", "none"]
    """What is subtracted from a reward: the mean of its group, of the group's others, nothing."""
    scale: Literal["group", "batch", "none"]
    """Whose standard deviation it is divided by. "batch" also subtracts the batch's mean."""
    clip: tuple[float, float] | None
    """The ratio is held above 1 − the first and below 1 + the second."""
    aggregate: Literal["token", "sequence", "constant"] = "token"
    length: int = 1
    """Tokens of a sequence, as "constant" counts them."""
    ratio: Literal["token", "sequence"] = "token"
    dual_clip: float | None = None
    overlong: Overlong | None = None
    resample: bool = False
    """Groups whose rewards are all equal are dropped, and others sampled in their place."""
    over: Literal["episodes", "tokens"] = "episodes"
    """What "batch" counts for its mean and standard deviation."""
    unbiased_std: bool = False
    """The standard deviation divides by n − 1."""
    std_eps: float = 1e-6
    """What is added to it."""


def _scale(normalise_std: bool) -> Literal["group", "none"]:
    return "group" if normalise_std else "none"


class GrpoConfig(Config, tag="grpo", tag_field="type"):
    """Group-relative policy optimisation with clipped importance ratios against the recorded log-probs."""

    clip_low: Clip = 0.2
    """The ratio is clipped below at 1 − clip_low."""
    clip_high: ClipAbove = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    normalise_std: bool = True
    """Divide a group's centred rewards by their standard deviation."""
    unbiased_std: bool = False
    """The standard deviation divides by n − 1 instead of n."""
    std_eps: StdEps = 1e-6
    """Added to the standard deviation that is divided by."""
    aggregate: Aggregate = "token"
    """`token`: mean over the batch's tokens. `sequence`: mean over sequences of each one's mean."""

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            "group",
            _scale(self.normalise_std),
            (self.clip_low, self.clip_high),
            self.aggregate,
            unbiased_std=self.unbiased_std,
            std_eps=self.std_eps,
        )


class DrGrpoConfig(Config, tag="dr_grpo", tag_field="type"):
    """GRPO without its two biases: no division by the group's standard deviation, nor by a sequence's length."""

    clip_low: Clip = 0.2
    clip_high: ClipAbove = 0.2
    length: Annotated[int, Meta(ge=1)] = 1024
    """What every sequence's sum is divided by, usually the longest completion. It scales the loss, no more."""

    @property
    def recipe(self) -> Recipe:
        return Recipe("group", "none", (self.clip_low, self.clip_high), "constant", self.length)


class RlooConfig(Config, tag="rloo", tag_field="type"):
    """REINFORCE with the mean of the group's other rewards as baseline. No clip."""

    aggregate: Aggregate = "token"

    @property
    def recipe(self) -> Recipe:
        return Recipe("others", "none", None, self.aggregate)


class ReinforcePlusPlusConfig(Config, tag="reinforce++", tag_field="type"):
    """REINFORCE++: advantages are normalised over the whole batch."""

    clip_low: Clip = 0.2
    clip_high: ClipAbove = 0.2
    group_baseline: bool = True
    """Subtract the group's mean first."""
    whiten: Literal["episodes", "tokens"] = "episodes"
    """What the batch's mean and standard deviation count: each episode once, or once for each of its tokens."""
    unbiased_std: bool = False
    std_eps: StdEps = 1e-6
    aggregate: Aggregate = "token"

    @property
    def recipe(self) -> Recipe:
        baseline: Literal["group", "none"] = "group" if self.group_baseline else "none"
        return Recipe(
            baseline,
            "batch",
            (self.clip_low, self.clip_high),
            self.aggregate,
            over=self.whiten,
            unbiased_std=self.unbiased_std,
            std_eps=self.std_eps,
        )


class DapoConfig(Config, tag="dapo", tag_field="type"):
    """GRPO with an asymmetric clip, a mean over tokens, a soft punishment of long episodes and dynamic sampling."""

    clip_low: Clip = 0.2
    clip_high: ClipAbove = 0.28
    normalise_std: bool = True
    unbiased_std: bool = False
    std_eps: StdEps = 1e-6
    resample: bool = True
    """Dynamic sampling: groups whose rewards are all equal teach nothing, and others are sampled in their place."""
    overlong_limit: Annotated[int, Meta(ge=1)] | None = None
    """Sampled tokens of an episode at which the punishment is whole. None: there is none."""
    overlong_buffer: Annotated[int, Meta(ge=1)] = 256
    """Tokens before the limit over which it grows from 0."""
    overlong_penalty: Annotated[float, Meta(ge=0)] = 1.0
    """What is subtracted from the reward at the limit."""

    def check(self) -> None:
        if self.overlong_limit is not None and self.overlong_buffer >= self.overlong_limit:
            raise ConfigError(
                "training.algorithm.overlong_buffer is less than overlong_limit",
                f"{self.overlong_buffer} >= {self.overlong_limit}",
                "lower the buffer",
            )

    @property
    def recipe(self) -> Recipe:
        overlong = (
            None
            if self.overlong_limit is None
            else Overlong(self.overlong_limit, self.overlong_buffer, self.overlong_penalty)
        )
        clip = self.clip_low, self.clip_high
        return Recipe(
            "group",
            _scale(self.normalise_std),
            clip,
            overlong=overlong,
            resample=self.resample,
            unbiased_std=self.unbiased_std,
            std_eps=self.std_eps,
        )


class GspoConfig(Config, tag="gspo", tag_field="type"):
    """The ratio, and its clip, are a sequence's: the geometric mean over its tokens."""

    clip_low: Clip = 3e-4
    clip_high: ClipAbove = 4e-4
    normalise_std: bool = True
    unbiased_std: bool = False
    std_eps: StdEps = 1e-6
    aggregate: Aggregate = "sequence"

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            "group",
            _scale(self.normalise_std),
            (self.clip_low, self.clip_high),
            self.aggregate,
            ratio="sequence",
            unbiased_std=self.unbiased_std,
            std_eps=self.std_eps,
        )


class PpoConfig(Config, tag="ppo", tag_field="type"):
    """PPO's clipped surrogate without a critic: advantages are rewards, normalised over the whole batch."""

    clip_low: Clip = 0.2
    clip_high: ClipAbove = 0.2
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """With a negative advantage the objective is held above this many times it. None: it is not."""
    whiten: Literal["episodes", "tokens"] = "episodes"
    unbiased_std: bool = False
    std_eps: StdEps = 1e-6
    aggregate: Aggregate = "token"

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            "none",
            "batch",
            (self.clip_low, self.clip_high),
            self.aggregate,
            dual_clip=self.dual_clip,
            over=self.whiten,
            unbiased_std=self.unbiased_std,
            std_eps=self.std_eps,
        )


Algorithm = GrpoConfig | DrGrpoConfig | RlooConfig | ReinforcePlusPlusConfig | DapoConfig | GspoConfig | PpoConfig
