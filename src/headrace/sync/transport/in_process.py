"""Weights within one process: the sender fills a shelf, receivers read it, on whatever device it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.sync.base import Destination, Manifest, Stream
from headrace.sync.deadline import Deadline
from headrace.sync.layout import ALIGN
from headrace.sync.transport.watermark import follow

NAME = "in_process"


class Shelf:
    """What both ends share: the bytes on offer, how many are there, and the number of the stream they are."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.state = (0, 0)
        """(generation, filled), replaced together."""


class InProcessOutlet:
    name = NAME
    align = ALIGN
    keeps = False

    def __init__(self, shelf: Shelf):
        self._shelf = shelf

    def open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        nbytes, shelf = draft.streams[-1].nbytes, self._shelf
        shelf.state = (shelf.state[0] + 1, 0)
        if shelf.memory.device != device or len(shelf.memory) < nbytes:
            shelf.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return shelf.memory[:nbytes]

    def location(self) -> dict[str, Any]:
        return {"generation": self._shelf.state[0]}

    def advance(self, filled: int) -> None:
        self._shelf.state = (self._shelf.state[0], filled)

    def reopen(self, to: Sequence[Destination]) -> dict[str, Any]:
        return self.location()

    def retain(self, numbers: Sequence[int]) -> None: ...

    def close(self) -> None:
        self._shelf.state = (self._shelf.state[0] + 1, 0)
        self._shelf.memory = torch.empty(0, dtype=torch.uint8)


class InProcessInlet:
    def __init__(self, shelf: Shelf):
        self._shelf = shelf

    def chunks(self, stream: Stream, deadline: Deadline, into: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        for first, last in follow(stream, deadline, NAME, lambda: self._shelf.state):
            yield first, self._shelf.memory[first:last]

    def close(self) -> None: ...
