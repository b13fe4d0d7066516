"""What every configuration class is: an immutable, typed struct that refuses keys it does not know."""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


# Type checkers do not see that a Struct's options are inherited; the transform states them for all subclasses.
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all configuration. A field's docstring says what it means and in which unit."""

    def check(self) -> None:
        """Raise ConfigError where fields contradict each other. The loader calls it on every node."""
