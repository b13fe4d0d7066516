from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.engine.native.pages import PagePool, pages_for
from headrace.engine.native.tree import PageTree

SIZE = 4
"""Tokens of a page, in the tests by hand."""


def row(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def keep(tree: PageTree, pool: PagePool, *tokens: int) -> list[int]:
    """Insert a sequence that has pages of its own and ends at once; its pages."""
    pages = pool.take(pages_for(len(tokens), SIZE))
    tree.insert(row(*tokens), pages)
    pool.release(pages)
    return pages.tolist()


def found(tree: PageTree, *tokens: int) -> tuple[list[int], int | None, int]:
    pages, tail_page, tail = tree.match(row(*tokens))
    assert pages.dtype == np.int64
    return pages.tolist(), tail_page, tail


@pytest.fixture
def pool() -> PagePool:
    return PagePool(20)


@pytest.fixture
def tree(pool: PagePool) -> PageTree:
    return PageTree(pool, SIZE)


def test_an_empty_tree_matches_nothing_and_has_nothing_to_evict(tree, pool):
    assert found(tree, 1, 2, 3, 4, 5) == ([], None, 0)
    assert found(tree) == ([], None, 0)
    tree.insert(row(), np.empty(0, np.int64))
    assert tree.evict(3) == 0
    assert (tree.pages, pool.free) == (0, 20)


def test_whole_pages_match_and_the_partly_filled_one_goes_on(tree, pool):
    a, b, c = keep(tree, pool, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert (tree.pages, pool.free) == (3, 17)
    assert found(tree, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) == ([a, b], c, 2)
    assert found(tree, 1, 2, 3, 4, 5, 6, 7, 8, 9) == ([a, b], c, 1)
    assert found(tree, 1, 2, 3, 4, 5, 6, 7, 8) == ([a, b], None, 0)
    assert found(tree, 1, 2, 3, 4, 5, 6, 7) == ([a], b, 3)
    assert found(tree, 1, 2) == ([], a, 2)
    assert found(tree, 2, 2, 3, 4) == ([], None, 0)


def test_tokens_that_diverge_within_a_page_match_up_to_there(tree, pool):
    a, b, _ = keep(tree, pool, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert found(tree, 1, 2, 3, 4, 5, 6, 99, 8, 9) == ([a], b, 2)
    d, e = keep(tree, pool, 1, 2, 3, 4, 5, 6, 99, 8, 9)[1:]
    assert tree.pages == 5
    assert found(tree, 1, 2, 3, 4, 5, 6, 99, 8, 9) == ([a, d], e, 1)
    assert found(tree, 1, 2, 3, 4, 5, 6, 7, 8) == ([a, b], None, 0)


@pytest.mark.parametrize(
    ("rest", "child", "tail"),
    [
        ((5, 6, 7, 9), 0, 3),
        ((5, 6, 8), 1, 3),
        ((5, 6, 8, 1), 1, 3),
        ((5, 7, 1), 2, 3),
        ((5, 7), 2, 2),
        ((5, 7, 1 + 256, 0), 2, 2),
        ((5 + 2**24, 6, 7), None, 0),
    ],
)
def test_the_child_that_agrees_longest_is_the_one_to_copy(tree, pool, rest, child, tail):
    children = [keep(tree, pool, 1, 2, 3, 4, *own)[1] for own in [(5, 6, 7, 8), (5, 6, 8), (5, 7, 1)]]
    matched = found(tree, 1, 2, 3, 4, *rest)
    assert matched[1:] == (None if child is None else children[child], tail)


def test_a_page_is_in_the_tree_once_and_the_first_one_stays(tree, pool):
    a, b = keep(tree, pool, 1, 2, 3, 4, 5, 6)
    keep(tree, pool, 1, 2, 3, 4, 5, 6)
    keep(tree, pool, 1, 2, 3, 4, 5)
    assert (tree.pages, pool.free) == (2, 18)
    assert found(tree, 1, 2, 3, 4, 5, 6) == ([a], b, 2)


def test_a_partly_filled_page_gives_way_to_a_longer_one(tree, pool):
    a, old = keep(tree, pool, 1, 2, 3, 4, 5)
    sibling = keep(tree, pool, 1, 2, 3, 4, 8)[1]
    own = pool.take(2)
    tree.insert(row(1, 2, 3, 4, 5, 6, 7), own)
    assert pool.references(old) == 0
    assert [pool.references(page) for page in own.tolist()] == [1, 2]
    assert found(tree, 1, 2, 3, 4, 5, 6, 7) == ([a], own[1], 3)
    assert found(tree, 1, 2, 3, 4, 8) == ([a], sibling, 1)
    full, last = keep(tree, pool, 1, 2, 3, 4, 5, 6, 7, 8, 9)[1:]
    assert pool.references(int(own[1])) == 1
    assert found(tree, 1, 2, 3, 4, 5, 6, 7, 8, 9) == ([a, full], last, 1)
    assert tree.pages == 4


def test_a_page_that_its_owner_fills_further_is_lengthened_in_place(tree, pool):
    pages = pool.take(3)
    tree.insert(row(1, 2, 3, 4, 5), pages[:2])
    tree.insert(row(1, 2, 3, 4, 5, 6, 7), pages[:2])
    assert found(tree, 1, 2, 3, 4, 5, 6, 9) == ([pages[0]], pages[1], 2)
    tree.insert(row(1, 2, 3, 4, 5, 6, 7, 8, 9), pages)
    assert found(tree, 1, 2, 3, 4, 5, 6, 7, 8, 9) == (pages[:2].tolist(), pages[2], 1)
    assert [pool.references(page) for page in pages.tolist()] == [2, 2, 2]
    tree.clear()
    assert [pool.references(page) for page in pages.tolist()] == [1, 1, 1]


def evicted(tree: PageTree, pool: PagePool, wanted: int) -> list[int]:
    """The pages that became free."""
    held = [page for page in range(pool.total) if pool.references(page)]
    count = tree.evict(wanted)
    freed = [page for page in held if not pool.references(page)]
    assert count == len(freed)
    return freed


def test_what_was_used_longest_ago_is_dropped_first_leaves_before_what_leads_to_them(tree, pool):
    a, b = keep(tree, pool, 1, 1, 1, 1, 2, 2, 2, 2)
    c = keep(tree, pool, 1, 1, 1, 1, 3, 3, 3, 3)[1]
    d, e = keep(tree, pool, 4, 4, 4, 4, 5)
    (f,) = keep(tree, pool, 6, 6)
    assert found(tree, 1, 1, 1, 1, 2, 2) == ([a], b, 2)
    assert found(tree, 4) == ([], d, 1)
    assert [evicted(tree, pool, 1) for _ in range(7)] == [[c], [e], [f], [b], [a], [d], []]
    assert (tree.pages, pool.free) == (0, 20)


def test_an_insertion_that_adds_nothing_is_a_use(tree, pool):
    (a,) = keep(tree, pool, 1, 1)
    (b,) = keep(tree, pool, 2, 2)
    keep(tree, pool, 1)
    assert [evicted(tree, pool, 1) for _ in range(2)] == [[b], [a]]


def test_as_many_pages_are_dropped_as_are_wanted(tree, pool):
    first = keep(tree, pool, *range(12))
    second = keep(tree, pool, *range(100, 108))
    assert evicted(tree, pool, 0) == []
    assert evicted(tree, pool, 2) == sorted(first[1:])
    assert found(tree, *range(12)) == (first[:1], None, 0)
    assert evicted(tree, pool, 9) == sorted(first[:1] + second)


def test_pages_in_use_and_what_leads_to_them_stay_and_keep_their_place_in_the_order(tree, pool):
    a, b = keep(tree, pool, 1, 1, 1, 1, 2)
    (c,) = keep(tree, pool, 3)
    (d,) = keep(tree, pool, 4)
    (e,) = keep(tree, pool, 5)
    for page in (b, d):
        pool.share(np.array([page]))
    assert evicted(tree, pool, 1) == [c]
    pool.release(np.array([d]))
    assert evicted(tree, pool, 1) == [d]
    assert evicted(tree, pool, 5) == [e]
    assert evicted(tree, pool, 5) == []
    assert found(tree, 1, 1, 1, 1, 2) == ([a], b, 1)
    pool.release(np.array([b]))
    assert evicted(tree, pool, 5) == sorted([a, b])


def test_a_page_was_last_used_when_any_that_it_led_to_was(tree, pool):
    a, b = keep(tree, pool, 1, 1, 1, 1, 2)
    (c,) = keep(tree, pool, 3)
    d = keep(tree, pool, 1, 1, 1, 1, 4)[1]
    for page in (b, c):
        pool.share(np.array([page]))
    assert evicted(tree, pool, 1) == [d]
    for page in (b, c):
        pool.release(np.array([page]))
    assert [evicted(tree, pool, 1) for _ in range(3)] == [[b], [c], [a]]


def test_a_leaf_in_use_may_grow_and_be_a_leaf_again(tree, pool):
    (a,) = keep(tree, pool, 1, 1, 1, 1)
    pool.share(np.array([a]))
    assert evicted(tree, pool, 1) == []
    b = keep(tree, pool, 1, 1, 1, 1, 2)[1]
    assert evicted(tree, pool, 2) == [b]
    pool.release(np.array([a]))
    assert evicted(tree, pool, 2) == [a]


def test_a_leaf_that_has_grown_is_dropped_once(tree, pool):
    (a,) = keep(tree, pool, 1, 1, 1, 1)
    b = keep(tree, pool, 1, 1, 1, 1, 2)[1]
    (c,) = keep(tree, pool, 3)
    assert evicted(tree, pool, 2) == sorted([a, b])
    assert evicted(tree, pool, 2) == [c]
    assert (tree.pages, pool.free) == (0, 20)


def test_a_cleared_tree_begins_anew_and_leaves_pages_in_use_to_their_users(tree, pool):
    pages = pool.take(3)
    tree.insert(row(*range(10)), pages)
    keep(tree, pool, 7, 7, 7, 7, 7)
    tree.clear()
    assert (tree.pages, pool.free) == (0, 17)
    assert found(tree, *range(10)) == ([], None, 0)
    assert tree.evict(1) == 0
    (a,) = keep(tree, pool, 0, 1)
    assert found(tree, *range(10)) == ([], a, 2)
    pool.release(pages)
    assert pool.free == 19


Beginning = tuple[int, ...]


def agreeing(one: Beginning, other: Beginning) -> int:
    """How many tokens the two begin with alike."""
    unlike = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unlike, min(len(one), len(other)))


class Model:
    """What a PageTree has to do, by brute force: each page by the beginning of a sequence that it ends."""

    def __init__(self, size: int):
        self.size = size
        self.pages: dict[Beginning, int] = {}
        self.uses: dict[Beginning, int] = {}
        self.clock = 0

    def place(self, beginning: Beginning) -> Beginning:
        """Where the last page of this beginning starts."""
        return beginning[: (len(beginning) - 1) // self.size * self.size]

    def longest(self, tokens: Beginning) -> int:
        return max((agreeing(tokens, kept) for kept in self.pages), default=0)

    def use(self, beginning: Beginning) -> None:
        self.clock += 1
        while beginning:
            self.uses[beginning] = self.clock
            beginning = self.place(beginning)

    def insert(self, tokens: Beginning, pages: list[int]) -> None:
        for number, page in enumerate(pages):
            beginning = tokens[: (number + 1) * self.size]
            there = [kept for kept in self.pages if self.place(kept) == self.place(beginning)]
            covering = [kept for kept in there if kept[: len(beginning)] == beginning]
            if not covering:
                for kept in there:
                    if beginning[: len(kept)] == kept:
                        del self.pages[kept], self.uses[kept]
                self.pages[beginning] = page
            # Of several that cover a partly filled page any may count as used; the tree takes the first in bytes.
            last = min(covering, key=lambda kept: row(*kept).tobytes(), default=beginning)
        self.use(last)

    def evict(self, wanted: int, held: set[int]) -> list[int]:
        freed: list[int] = []
        while len(freed) < wanted:
            inner = {self.place(kept) for kept in self.pages}
            leaves = [kept for kept, page in self.pages.items() if kept not in inner and page not in held]
            if not leaves:
                break
            oldest = min(leaves, key=self.uses.__getitem__)
            freed.append(self.pages.pop(oldest))
            del self.uses[oldest]
        return freed


# The two tokens differ only in the highest byte, the one compared last.
token_rows = st.lists(st.sampled_from([1, 1 + 2**24]), min_size=1, max_size=11).map(tuple)


class TreeWithSequences(RuleBasedStateMachine):
    """Sequences begin with what the tree has, write on, are inserted in part or whole, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.size, total = 3, 24
        self.pool = PagePool(total)
        self.tree = PageTree(self.pool, self.size)
        self.model = Model(self.size)
        self.running: list[tuple[Beginning, list[int]]] = []
        self.written: dict[tuple[int, int], Beginning] = {}
        """By page and place in it: the beginning whose last token's keys and values are there."""

    @rule(tokens=token_rows)
    def begin(self, tokens: Beginning) -> None:
        pages, tail_page, tail = self.tree.match(row(*tokens))
        length = self.model.longest(tokens)
        assert (len(pages), tail) == divmod(length, self.size)
        assert (tail_page is None) == (tail == 0)
        beginning = tokens[: length - tail]
        for number, page in enumerate(pages.tolist()):
            assert page == self.model.pages[tokens[: (number + 1) * self.size]]
        if tail_page is not None:
            (beginning,) = [kept for kept, page in self.model.pages.items() if page == tail_page]
            assert beginning[:length] == tokens[:length]
        self.model.use(beginning)
        sources = [*pages.tolist(), *([tail_page] if tail else [])]
        for position in range(length):
            assert self.written[sources[position // self.size], position % self.size] == tokens[: position + 1]
        self.pool.share(pages)
        self.running.append((tokens[: length - tail], pages.tolist()))
        self.go_on(len(self.running) - 1, tokens[length - tail :])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=token_rows)
    def write(self, data: st.DataObject, tokens: Beginning) -> None:
        self.go_on(data.draw(st.integers(0, len(self.running) - 1)), tokens)

    def go_on(self, number: int, more: Beginning) -> None:
        tokens, pages = self.running[number]
        wanted = pages_for(len(tokens) + len(more), self.size) - len(pages)
        if self.pool.free < wanted:
            self.evict(wanted - self.pool.free)
        if self.pool.free < wanted:
            del self.running[number]
            self.pool.release(np.array(pages, np.int64))
            return
        pages.extend(self.pool.take(wanted).tolist())
        self.running[number] = (tokens + more, pages)
        for position in range(len(tokens), len(tokens) + len(more)):
            self.written[pages[position // self.size], position % self.size] = (tokens + more)[: position + 1]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        tokens, pages = data.draw(st.sampled_from(self.running))
        count = data.draw(st.integers(1, len(tokens)))
        first = pages[: pages_for(count, self.size)]
        self.tree.insert(row(*tokens[:count]), np.array(first))
        self.model.insert(tokens[:count], first)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, pages = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.release(np.array(pages))

    @rule(wanted=st.integers(0, 8))
    def evict(self, wanted: int) -> None:
        expected = self.model.evict(wanted, {page for _, pages in self.running for page in pages})
        assert evicted(self.tree, self.pool, wanted) == sorted(expected)

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.model = Model(self.size)

    @invariant()
    def every_page_has_as_many_references_as_it_has_holders(self) -> None:
        holders = [*self.model.pages.values(), *(page for _, pages in self.running for page in pages)]
        counts = np.bincount(np.array(holders, np.int64), minlength=self.pool.total).tolist()
        assert [self.pool.references(page) for page in range(self.pool.total)] == counts
        assert self.pool.free == counts.count(0)
        assert self.tree.pages == len(self.model.pages)
        assert np.flatnonzero(self.tree.references).tolist() == sorted(self.model.pages.values())
        assert self.tree.references.max() <= 1

    def teardown(self) -> None:
        for _, pages in self.running:
            self.pool.release(np.array(pages, np.int64))
        self.tree.clear()
        assert self.pool.free == self.pool.total


def test_a_tree_among_running_sequences_does_what_brute_force_does():
    short = settings(max_examples=150, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(TreeWithSequences, settings=short)


# ── Adapters ─────────────────────────────────────────────────────────────────────────────────────────────


def test_adapters_have_beginnings_of_their_own_and_lose_them_alone(tree, pool):
    kept: dict[int, list[int]] = {}
    for adapter in range(3):
        pages = pool.take(2)
        tree.insert(row(1, 2, 3, 4, 5, 6), pages, adapter)
        pool.release(pages)
        kept[adapter] = pages.tolist()
    for adapter, (full, tail) in kept.items():
        match = tree.match(row(1, 2, 3, 4, 5, 6, 7), adapter)
        assert (match.pages.tolist(), match.tail_page, match.tail) == ([full], tail, 2)
    assert tree.match(row(1, 2, 3, 4), 3).pages.tolist() == []
    tree.clear(1)
    assert (tree.pages, pool.free) == (4, 16)
    assert tree.match(row(1, 2, 3, 4), 1).pages.tolist() == []
    # What was used longest ago goes first, whoever's it is.
    tree.match(row(1, 2, 3, 4, 5, 6), 0)
    assert evicted(tree, pool, 2) == sorted(kept[2])
    assert evicted(tree, pool, 5) == sorted(kept[0])
    assert (tree.pages, pool.free) == (0, 20)


def test_trees_of_several_adapters_do_what_one_tree_for_each_would():
    dice = np.random.default_rng(0)
    pool = PagePool(400)
    tree, alone = PageTree(pool, SIZE), [PageTree(PagePool(400), SIZE) for _ in range(3)]
    for _ in range(600):
        adapter = int(dice.integers(3))
        own, tokens = alone[adapter], dice.integers(0, 2, dice.integers(1, 14)).astype(np.int32)
        if dice.random() < 0.03:
            tree.clear(adapter)
            own.clear()
        elif dice.random() < 0.5:
            for one, its in ((tree, pool), (own, own._pool)):
                pages = its.take(pages_for(len(tokens), SIZE))
                one.insert(tokens, pages, adapter if one is tree else 0)
                its.release(pages)
        found, expected = tree.match(tokens, adapter), own.match(tokens)
        assert (len(found.pages), found.tail) == (len(expected.pages), expected.tail)
        assert tree.pages == sum(one.pages for one in alone) == pool.total - pool.free
    assert tree.evict(400) > 0
    assert (tree.pages, pool.free) == (0, 400)
