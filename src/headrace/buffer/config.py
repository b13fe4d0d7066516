"""Configuration of the buffer and of staleness. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.config.base import Config
from headrace.errors import ConfigError


class BufferConfig(Config):
    """What lies between generation and training, and how old a token may be when it is trained on."""

    type: Literal["none", "double", "bounded", "unbounded"] = "bounded"
    """`none`: generation and training take turns (synchronous; no token is stale). `double`: the next batch is
    generated while one is trained. `bounded`: up to `depth` groups wait. `unbounded`: any number."""
    depth: Annotated[int, Meta(ge=1)] | None = None
    """For `bounded`: most groups admitted and not yet trained. None: what `max_staleness` allows."""
    max_staleness: Annotated[int, Meta(ge=0)] | None = None
    """Most versions a token may be behind the trainer that trains on it. None: 0 for `none`, 1 for `double`,
    2 for `bounded`, no bound for `unbounded`."""
    order: Literal["fifo", "windowed", "first_finished"] = "fifo"
    """Which finished groups make the next batch: the oldest admitted; any among the oldest admitted `window`
    groups; any."""
    window: Annotated[int, Meta(ge=1)] | None = None
    """For `windowed`: how many of the oldest groups a batch chooses from. None: two batches."""
    late: Literal["wait", "drop"] = "wait"
    """When a group must be trained now to stay within the bound and is not finished: the trainer waits for it,
    or its unfinished episodes are dropped."""

    @property
    def staleness_bound(self) -> int | None:
        if self.max_staleness is not None:
            return self.max_staleness
        return {"none": 0, "double": 1, "bounded": 2, "unbounded": None}[self.type]

    def capacity(self, batch_groups: int) -> int | None:
        """Most groups admitted and not yet taken by the trainer; None when only the bound limits them."""
        if self.type in ("none", "double"):
            return batch_groups
        return self.depth if self.type == "bounded" else None

    def window_groups(self, batch_groups: int) -> int | None:
        """How many of the oldest outstanding groups a batch may be chosen from; None for all."""
        if self.order == "fifo":
            return batch_groups
        if self.order == "first_finished":
            return None
        return self.window if self.window is not None else 2 * batch_groups

    def check(self) -> None:
        if self.type == "none" and self.max_staleness not in (None, 0):
            raise ConfigError(
                'buffer.type = "none" is synchronous: its max_staleness is 0',
                self.max_staleness,
                'remove buffer.max_staleness or choose buffer.type = "bounded"',
            )
        if self.type == "double" and self.max_staleness == 0:
            raise ConfigError(
                'buffer.type = "double" generates one batch ahead: its max_staleness is at least 1',
                self.max_staleness,
                'choose buffer.type = "none" for synchronous training',
            )
        if self.depth is not None and self.type != "bounded":
            raise ConfigError(
                'buffer.depth belongs to buffer.type = "bounded"',
                self.type,
                "remove buffer.depth or change the type",
            )
        if self.window is not None and self.order != "windowed":
            raise ConfigError(
                'buffer.window belongs to buffer.order = "windowed"', self.order, "remove buffer.window"
            )
