"""Who gives up pages when they run out, and who keeps them."""

from __future__ import annotations

import numpy as np
from engine_builders import (
    TOLERANCE,
    VOCAB,
    all_free,
    drive,
    finish,
    make_engine,
    request,
    worst_replay,
)

from headrace.engine.base import SampleRequest
from headrace.engine.native import NativeEngine
from headrace.records import Turn


def random_context(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, tokens)


def holding(engine: NativeEngine) -> list[int]:
    """Held requests that have pages still."""
    return [number for number, sequence in engine._scheduler.held.items() if sequence.shared is not None]


def sharing(engine: NativeEngine) -> int:
    return sum(sequence.shared is not None for sequence in engine._scheduler.queue)


def drive_one(engine: NativeEngine, wanted: SampleRequest) -> dict[int, Turn]:
    """Until this one has ended, whatever else runs."""
    engine.add(wanted)
    turns: dict[int, Turn] = {}
    while wanted.id not in turns:
        turns |= dict(engine.step())
    return turns


# ── Admission ────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_held_makes_way_for_requests_beside_what_runs():
    def steps(hold: bool) -> int:
        engine = make_engine(config={"max_running": 16, "cache_tokens": 16 * 32})
        drive(engine, [request(i, random_context(i, 16), 14, hold=hold) for i in range(16)])
        assert len(holding(engine)) == 16 * hold
        before = engine.steps
        turns = drive(engine, [request(100 + i, random_context(100 + i, 16), 14) for i in range(16)])
        assert worst_replay(turns) < TOLERANCE
        return engine.steps - before

    assert steps(hold=True) == steps(hold=False) == 14


def with_one_running(**config: int) -> NativeEngine:
    """31 of 32 pages in use: three held requests have 5 each, one that runs has 16."""
    engine = make_engine(config={"page_size": 4, "cache_tokens": 128, "max_context": 96, **config})
    for i in range(3):
        drive(engine, [request(i, random_context(i, 16), 5, hold=True)])
    engine.drop_prefixes()
    engine.add(request(9, random_context(9, 61), 30))
    engine.step()
    engine.drop_prefixes()
    assert (engine.pages_free, engine.running, holding(engine)) == (1, 1, [0, 1, 2])
    return engine


def test_the_oldest_go_first_and_no_more_of_them_than_needed():
    engine = with_one_running()
    engine.add(request(10, random_context(10, 24), 2))
    engine.step()
    assert engine.running == 2
    assert holding(engine) == [1, 2]
    assert worst_replay(finish(engine)) < TOLERANCE
    assert all_free(engine)


def test_nothing_goes_for_a_request_that_has_to_wait_all_the_same():
    engine = with_one_running()
    turns = drive_one(engine, request(20, random_context(20, 3), 1))
    assert engine._scheduler.tree.pages == 1
    engine.add(request(10, random_context(10, 80), 2))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    assert holding(engine) == [0, 1, 2]
    assert engine._scheduler.tree.pages == 1
    turns |= finish(engine)
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_who_holds_only_what_others_use_too_keeps_it():
    engine = with_one_running()
    # Its 15 pages are those of the request that runs.
    turns = drive_one(engine, request(11, [], 1, fork_of=9, fork_at=60, hold=True))
    held = engine._scheduler.held
    engine._scheduler.held = {number: held[number] for number in (11, 0, 1, 2)}
    engine.add(request(10, random_context(10, 24), 2))
    engine.step()
    assert engine.running == 2
    assert holding(engine) == [11, 1, 2]
    turns |= finish(engine)
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_kept_beginnings_that_lead_to_what_is_in_use_make_room_too():
    engine = make_engine(config={"page_size": 4, "cache_tokens": 96, "max_context": 96})
    scheduler = engine._scheduler
    pool, tree = scheduler.pool, scheduler.tree
    tokens = np.arange(16, dtype=np.int32)
    leading, own = pool.take(4), pool.take(2)
    tree.insert(tokens, leading)
    # Computed by another, who has pages of its own for what leads to it.
    tree.insert(np.append(tokens, tokens[:8]), np.concatenate([leading, own]))
    pool.release(leading)
    rest = pool.take(18)
    assert (pool.free, tree.evict(1)) == (0, 0)
    assert not scheduler._room(5)
    assert tree.pages == 6
    assert scheduler._room(4)
    assert (pool.free, tree.pages) == (4, 0)
    pool.release(np.concatenate([own, rest]))
    assert all_free(engine)


# ── Decoding ─────────────────────────────────────────────────────────────────────────────────────────────


def test_waiting_forks_keep_what_they_share_while_that_frees_nothing():
    engine = make_engine(config={"max_running": 1, "page_size": 4, "cache_tokens": 128})
    turns = drive(engine, [request(1, np.arange(30), 10, hold=True)])
    engine.add(request(2, np.arange(31)[::-1], 64))
    engine.step()
    for i in range(8):
        engine.add(request(10 + i, [], 2, fork_of=2, fork_at=31))
    while engine.running and 2 not in turns:
        assert sharing(engine) == 8
        turns |= dict(engine.step())
    assert holding(engine) == []
    turns |= finish(engine)
    assert engine.tokens_prefilled == 30 + 31
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_waiting_forks_give_up_pages_that_only_they_have_before_anyone_is_preempted():
    engine = make_engine(config={"max_running": 1, "page_size": 4, "cache_tokens": 96})
    turns = drive(engine, [request(0, random_context(0, 30), 10, hold=True)])
    engine.add(request(1, random_context(1, 8), 80))
    engine.step()
    for i in range(2, 5):
        engine.add(request(i, [], 4, fork_of=0, fork_at=[0, 0, 16, 24, 38][i]))
    engine.release(0)
    engine.drop_prefixes()
    lost: list[list[int]] = []
    while 1 not in turns:
        turns |= dict(engine.step())
        now = [s.request.id for s in engine._scheduler.queue if s.shared is None]
        if now and now not in lost:
            lost.append(now)
    # The last in the queue first, which has the most pages that only it has.
    assert lost == [[4], [3, 4], [2, 3, 4]]
    turns |= finish(engine)
    assert not any(event.cause == "preempt" for turn in turns.values() for event in turn.lineage)
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)
