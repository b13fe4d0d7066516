"""The buffer room's interface: groups are admitted, finish or are dropped, and leave in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.records import Group


@dataclass(frozen=True)
class Ticket:
    """Leave to generate one group, and the promise that it will be trained by its deadline or dropped."""

    sequence: int
    admitted_version: int
    deadline: int


class Buffer(Protocol):
    """Holds a group from its admission until the trainer takes it. Used from one event loop."""

    on_late: Callable[[Ticket], None]
    """Called for a group whose unfinished episodes are to be dropped now; it then finishes or is dropped."""

    async def admit(self) -> Ticket:
        """Wait until one more group is sure to stay within the bound."""
        ...

    def ended(self, ticket: Ticket) -> None:
        """One of its group's episodes needs the engines no more. Those not told of end with `put` or `drop`."""
        ...

    async def put(self, ticket: Ticket, group: Group) -> None:
        """The ticket's group has finished."""
        ...

    async def drop(self, ticket: Ticket) -> None:
        """The ticket's group will not come."""
        ...

    async def take(self) -> tuple[int, list[Group]]:
        """Wait for the next batch. Returns the version it is to be trained at, which then counts as used."""
        ...

    def engines_serve(self, version: int) -> None:
        """The slowest engine now serves `version`."""
        ...

    @property
    def ready(self) -> int:
        """Finished groups that wait for the trainer."""
        ...

    @property
    def outstanding(self) -> int:
        """Groups admitted and neither taken nor dropped."""
        ...
