"""Prompts whose keys and values are kept for further requests with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headrace.engine.native.pages import PagePool

Key = tuple[int, bytes]
"""The version whose weights computed it, and the prompt's tokens."""


@dataclass(eq=False, slots=True)
class Prefix:
    key: Key
    tokens: np.ndarray
    pages: np.ndarray
    """All of the prompt's pages; the last may be partly filled."""
    hidden: Tensor | None = None
    """(D,) after the last prompt token: what the first sampled token comes from. None until computed."""


class PrefixCache:
    """Least recently used first out. An entry holds one reference to each of its pages."""

    def __init__(self, pool: PagePool, capacity: int):
        self._pool = pool
        self._capacity = capacity
        self._entries: OrderedDict[Key, Prefix] = OrderedDict()

    def get(self, key: Key) -> Prefix | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, entry: Prefix) -> None:
        self._entries[entry.key] = entry
        if len(self._entries) > self._capacity:
            self.evict()

    def evict(self, keep: Prefix | None = None) -> bool:
        """Drop the entry used longest ago, other than `keep`. False when there is none."""
        victim = next((entry for entry in self._entries.values() if entry is not keep), None)
        if victim is None:
            return False
        self.hand_over(victim)
        self._pool.release(victim.pages)
        return True

    def hand_over(self, entry: Prefix) -> None:
        """Forget the entry; its references to pages become the caller's."""
        del self._entries[entry.key]

    def clear(self) -> None:
        while self.evict():
            pass
