"""Which page of the KV cache belongs to whom. Page numbers only; the tensors are in kv.py."""

from __future__ import annotations

import numpy as np


class PagePool:
    """Reference-counted page numbers 0 … total - 1. The pages freed last are taken first: they are warm."""

    def __init__(self, total: int):
        self.total = total
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int64)
        self._references = np.zeros(total, np.int64)
        self.free = total

    def take(self, count: int) -> np.ndarray:
        """`count` pages, each with one reference. The caller has checked that so many are free."""
        assert count <= self.free
        pages = self._stack[self.free - count : self.free].copy()
        self.free -= count
        self._references[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """One more reference to each of these different pages."""
        self._references[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """One reference less to each of these different pages; those without any are free again."""
        self._references[pages] -= 1
        freed = pages[self._references[pages] == 0]
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)

    def references(self, page: int) -> int:
        return int(self._references[page])

    def in_use_only(self, references: np.ndarray) -> np.ndarray:
        """Bool, of every page: whether it is in use, and these references to each are all there are."""
        return (self._references > 0) & (self._references == references)


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
