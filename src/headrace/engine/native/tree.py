"""Beginnings of sequences whose keys and values are kept: a tree of pages.

    root ── page 4 "the cat " ─┬─ page 7 "sat on t" ── page 2 "he" (partly filled)
                               └─ page 9 "sat down"

A path from a root spells a beginning; the base weights and each adapter have a root of their own. Of the children
of one node none begins with all of another: they are kept sorted, so the one that agrees longest with given tokens
is next to where those would be inserted.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from headrace.engine.native.pages import PagePool, pages_for

TOKEN_BYTES = 4
_key = attrgetter("key")


class Match(NamedTuple):
    pages: np.ndarray
    """int64; the pages full of matching tokens, in order: they may be shared."""
    tail_page: int | None
    """The page whose first `tail` tokens are the next ones: it may be copied. None where no token goes on."""
    tail: int


class _Node:
    __slots__ = ("children", "key", "last_use", "page", "parent")

    def __init__(self, key: bytes, page: int, parent: _Node | None):
        self.key, self.page, self.parent = key, page, parent
        self.children: list[_Node] = []
        """By rising key."""
        self.last_use = 0
        """Of itself and of the children it has lost: while it has some, theirs may be later."""

    @property
    def is_root(self) -> bool:
        return self.parent is None


class PageTree:
    """Which pages hold which beginnings of sequences, as one version of the weights computes them: of the base
    weights (0), or of an adapter, by its number.

    Holds one reference to each of its pages, and each page once. Not thread-safe. Tokens are int32 rows. What
    a page holds of its inserted tokens must not change while the tree has it; beyond them it may be written.
    """

    def __init__(self, pool: PagePool, page_size: int):
        self._pool, self._page_size = pool, page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[int, _Node] = {}
        self._clock = 0
        # Every leaf is in one of these two, once. What has grown or been used since is seen to when it comes up:
        # always before the children it has grown, as they are younger than its time here. No two times in the
        # heap are the same, for a use is noted at one node.
        self._leaves: list[tuple[int, _Node]] = []
        self._leaves_in_use: list[_Node] = []
        self.pages = 0
        """Held now."""
        self.references = np.zeros(pool.total, np.int64)
        """To every page of the pool: 1 where it is held."""

    def match(self, tokens: np.ndarray, adapter: int = 0) -> Match:
        """The longest beginning of `tokens` that this adapter has in the tree, which counts as a use of it.

        Takes no references: share or copy the pages before anything can evict them.
        """
        node, pages, data = self._root(adapter), [], _data(tokens)
        children, tail_page, tail = node.children, None, 0
        for start in range(0, len(data), self._page_bytes):
            key = data[start : start + self._page_bytes]
            at = bisect_left(children, key, key=_key)
            if at < len(children) and children[at].key == key and len(key) == self._page_bytes:
                node = children[at]
                children = node.children
                pages.append(node.page)
                continue
            for child in children[max(at - 1, 0) : at + 1]:
                common = _common_tokens(child.key, key)
                if common > tail:
                    node, tail_page, tail = child, child.page, common
            break
        self._use(node)
        return Match(np.array(pages, np.int64), tail_page, tail)

    def insert(self, tokens: np.ndarray, pages: np.ndarray, adapter: int = 0) -> None:
        """Keep `pages`, which hold all of `tokens` in order, as far as the tree lacks them; a use of them all.

        Takes a reference to each page it adds. A partly filled page gives way to one that goes on from it,
        and is not added where there is one.
        """
        assert len(pages) == pages_for(len(tokens), self._page_size)
        node, data = self._root(adapter), _data(tokens)
        for known, start in enumerate(range(0, len(data), self._page_bytes)):
            key = data[start : start + self._page_bytes]
            children = node.children
            at = bisect_left(children, key, key=_key)
            if at < len(children) and children[at].key.startswith(key):
                node = children[at]
            elif at and key.startswith(children[at - 1].key):
                node = children[at - 1]
                self._lengthen(node, key, pages[known : known + 1])
            else:
                self._grow(node, at, data[start:], pages[known:])
                return
        self._use(node)

    def evict(self, pages_wanted: int) -> int:
        """Drop the leaves used longest ago that only the tree references, until so many pages became free.

        Returns how many did: fewer when all that is left is referenced by others, or leads to what is.
        """
        self._queue_leaves_out_of_use()
        freed: list[int] = []
        while self._leaves and len(freed) < pages_wanted:
            queued_at, node = heappop(self._leaves)
            if node.children:
                continue
            if node.last_use > queued_at:
                heappush(self._leaves, (node.last_use, node))
            elif self._pool.references(node.page) > 1:
                self._leaves_in_use.append(node)
            else:
                self._drop(node)
                freed.append(node.page)
        self._release(freed)
        return len(freed)

    def prune(self) -> int:
        """Drop every page that only the tree references, with all that goes on from it, also what others use.

        For when nothing can be evicted: a page nobody uses may lead to one that is in use. Returns how many pages
        became free.
        """
        nodes, pages, free = [*self._roots.values()], [], self._pool.free
        self._leaves.clear()
        self._leaves_in_use.clear()
        while nodes:
            node = nodes.pop()
            unused = [child for child in node.children if self._pool.references(child.page) == 1]
            node.children = [child for child in node.children if self._pool.references(child.page) > 1]
            while unused:
                gone = unused.pop()
                pages.append(gone.page)
                unused += gone.children
                node.last_use = max(node.last_use, gone.last_use)
            nodes += node.children
            if not node.children and not node.is_root:
                self._queue(node)
        self._release(pages)
        return self._pool.free - free

    def clear(self, adapter: int | None = None) -> None:
        """Release everything, or all that one adapter has."""
        pages: list[int] = []
        gone: set[_Node] = set()
        nodes = [*self._roots.values()] if adapter is None else [self._root(adapter)]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children)
            gone.update(node.children)
            pages.extend(child.page for child in node.children)
            node.children = []
        # What is left of a heap's list, in its order, need not be one.
        self._leaves = [(queued_at, leaf) for queued_at, leaf in self._leaves if leaf not in gone]
        heapify(self._leaves)
        self._leaves_in_use = [leaf for leaf in self._leaves_in_use if leaf not in gone]
        self._release(pages)

    def _root(self, adapter: int) -> _Node:
        return self._roots.setdefault(adapter, _Node(b"", -1, None))

    def _lengthen(self, node: _Node, key: bytes, page: np.ndarray) -> None:
        """Let a partly filled node be the page of `key`, which begins with its tokens."""
        # In this order it may be the page that the node has.
        self._pool.share(page)
        self._pool.release(np.array([node.page]))
        self.references[node.page] = 0
        self.references[page] = 1
        node.key, node.page = key, int(page[0])

    def _grow(self, node: _Node, at: int, data: bytes, pages: np.ndarray) -> None:
        """Add a branch of `pages` as the node's child number `at`."""
        self._pool.share(pages)
        self.references[pages] = 1
        self.pages += len(pages)
        for start, page in zip(range(0, len(data), self._page_bytes), pages.tolist(), strict=True):
            child = _Node(data[start : start + self._page_bytes], page, node)
            node.children.insert(at, child)
            node, at = child, 0
        self._use(node)
        self._queue(node)

    def _drop(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[bisect_left(parent.children, leaf.key, key=_key)]
        parent.last_use = max(parent.last_use, leaf.last_use)
        if not parent.children and not parent.is_root:
            self._queue(parent)

    def _release(self, pages: list[int]) -> None:
        gone = np.array(pages, np.int64)
        self.references[gone] = 0
        self.pages -= len(gone)
        self._pool.release(gone)

    def _use(self, node: _Node) -> None:
        """Note a use of the node and of all that leads to it, at the node alone: they outlive it."""
        self._clock += 1
        node.last_use = self._clock

    def _queue(self, leaf: _Node) -> None:
        heappush(self._leaves, (leaf.last_use, leaf))

    def _queue_leaves_out_of_use(self) -> None:
        leaves = [node for node in self._leaves_in_use if not node.children]
        self._leaves_in_use = []
        for node in leaves:
            if self._pool.references(node.page) > 1:
                self._leaves_in_use.append(node)
            else:
                self._queue(node)


def _data(tokens: np.ndarray) -> bytes:
    assert tokens.dtype == np.int32
    return tokens.tobytes()


def _common_tokens(one: bytes, other: bytes) -> int:
    """How many tokens at the beginning are the same."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    differing = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)
