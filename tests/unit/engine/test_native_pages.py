from __future__ import annotations

import numpy as np
import pytest

from headrace.engine.native.attention import group_rows
from headrace.engine.native.pages import PagePool, pages_for
from headrace.engine.native.requests import note
from headrace.records import KvEvent


def test_a_page_is_free_again_when_its_last_reference_is_released():
    pool = PagePool(5)
    taken = pool.take(3)
    pool.share(taken[:2])
    assert pool.free == 2
    assert sorted(taken) == [0, 1, 2]
    pool.release(taken)
    assert pool.free == 3
    pool.release(taken[:2])
    assert pool.free == 5
    assert sorted(pool.take(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_page_is_counted_when_it_is_begun(tokens, pages):
    assert pages_for(tokens, 4) == pages


def event(position: int, version: int, before: str, cause: str = "swap") -> KvEvent:
    return KvEvent(position=position, version=version, before=before, cause=cause)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        ((9, 1, "kept"), (9, 2, "kept"), [(9, 2, "kept")]),
        ((9, 1, "kept"), (9, 2, "recomputed"), [(9, 2, "recomputed")]),
        ((9, 1, "recomputed"), (9, 2, "recomputed"), [(9, 2, "recomputed")]),
        ((9, 1, "recomputed"), (9, 2, "kept"), [(9, 1, "recomputed"), (9, 2, "kept")]),
        ((8, 1, "kept"), (9, 2, "kept"), [(8, 1, "kept"), (9, 2, "kept")]),
    ],
)
def test_of_events_without_a_pass_between_them_only_what_matters_is_kept(first, second, left):
    lineage = [event(0, 0, "kept", "start")]
    note(lineage, event(*first))
    note(lineage, event(*second))
    assert [(e.position, e.version, e.before) for e in lineage] == [(0, 0, "kept"), *left]


def test_rows_of_like_length_are_gathered_together():
    # A page of 64 KiB: on a CPU four pages of padding are worth one more group.
    assert group_rows(np.array([1, 1, 1, 2, 2]), 2**16, "cpu") == [(0, 5, 2)]
    assert group_rows(np.array([1, 1, 1, 9, 9]), 2**16, "cpu") == [(0, 3, 1), (3, 5, 9)]
    assert group_rows(np.array([4]), 2**16, "cpu") == [(0, 1, 4)]


def test_groups_cover_every_row_once_with_enough_pages_and_bounded_size():
    rng = np.random.default_rng(0)
    for _ in range(50):
        pages = np.sort(rng.integers(1, 200, rng.integers(1, 80)))
        runs = group_rows(pages, 2**18, "cpu")
        covered = [row for first, last, _ in runs for row in range(first, last)]
        assert covered == list(range(len(pages)))
        for first, last, width in runs:
            assert pages[first:last].max() <= width
            assert (last - first) * width <= 256 or last - first == 1
