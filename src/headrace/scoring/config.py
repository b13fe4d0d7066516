"""Configuration of scoring. No torch here."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError


class ScorerConfig(Config):
    """What gives an episode its reward, in worker processes of its own."""

    source: str = "headrace.scoring.rules:ExactMatch"
    """The scorer: a class or a function, "module:Name" or "file.py:Name". Built in, in `headrace.scoring.rules`:
    ExactMatch, MathVerify, ReasoningGym."""
    options: dict[str, Any] = {}
    """Keyword arguments of its constructor, or of each call of a function."""
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
        if ":" not in self.source:
            raise ConfigError(
                'scorer.source names a scorer as "module:Name" or "file.py:Name"',
                self.source,
                'built in: "headrace.scoring.rules:ExactMatch"',
            )
