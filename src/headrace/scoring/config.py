"""Configuration of scoring. No torch here."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_DEFAULT = "headrace.scoring.rules:ExactMatch"


class RewardConfig(Config):
    """One of several scorers whose rewards are added up."""

    source: str
    """The scorer, as `scorer.source`."""
    weight: float = 1.0
    """Its reward is multiplied by this before the sum. With 0 it is kept as a metric alone."""
    name: str | None = None
    """What its own reward is kept by, as the episode's metric reward/NAME. None: the name in `source`."""
    options: dict[str, Any] = {}
    """As `scorer.options`."""

    @property
    def called(self) -> str:
        """Its name."""
        return self.source.rpartition(":")[2] if self.name is None else self.name

    def check(self) -> None:
        _check_source("a source of scorer.rewards", self.source)
        if not _NAME.fullmatch(self.called):
            raise ConfigError(
                'the name of one of scorer.rewards is at most 40 letters, digits, "_", "." and "-"',
                self.called,
                "set another name",
            )


class ScorerConfig(Config):
    """What gives an episode its reward, in worker processes of its own."""

    source: str = _DEFAULT
    """The scorer: a class or a function, "module:Name" or "file.py:Name". Built in, in `headrace.scoring.rules`:
    ExactMatch, MathVerify, ReasoningGym."""
    options: dict[str, Any] = {}
    """Keyword arguments of its constructor, or of each call of a function."""
    rewards: tuple[RewardConfig, ...] = ()
    """In place of `source`: several scorers, whose rewards are multiplied by their weights and added up."""
    workers: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Worker processes."""
    concurrency: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Episodes scored at once in one worker, for scorers that wait rather than compute."""
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest one episode's scoring may take, in seconds."""
    pass_env: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    """Environment variables that its workers get beside the usual ones: names, or patterns such as "OPENAI_*". "*"
    passes all."""

    def check(self) -> None:
        _check_source("scorer.source", self.source)
        if self.rewards and (self.source != _DEFAULT or self.options):
            raise ConfigError(
                "an episode's reward is made by scorer.source or by scorer.rewards",
                self.source if self.source != _DEFAULT else "scorer.options",
                "make it one of scorer.rewards too, or leave one of the two out",
            )
        names = [reward.called for reward in self.rewards]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError("scorer.rewards have different names", twice[0], "set their names")


def _check_source(key: str, source: str) -> None:
    if ":" not in source:
        raise ConfigError(
            f'{key} names a scorer as "module:Name" or "file.py:Name"',
            source,
            'built in: "headrace.scoring.rules:ExactMatch"',
        )
