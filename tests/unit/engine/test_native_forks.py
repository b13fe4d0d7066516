"""Forks: what they share with their source, what they cost, and that their log-probs are true."""

from __future__ import annotations

import numpy as np
import pytest
from engine_builders import (
    TOLERANCE,
    TRUNCATING,
    VOCAB,
    all_free,
    events,
    finish,
    make_engine,
    publish,
    request,
    worst_replay,
)

from headrace.engine.base import Interrupt
from headrace.engine.native import NativeEngine
from headrace.errors import EpisodeFailure
from headrace.records import Turn

PROMPT = list(range(10))


def with_source(*, held: bool, tokens: int = 30, **settings: int) -> tuple[NativeEngine, dict[int, Turn]]:
    """An engine, and what has ended: request 0 was held, or still runs with 15 tokens."""
    engine = make_engine(config={"page_size": 4, **settings})
    engine.add(request(0, PROMPT, tokens, hold=held))
    if held:
        return engine, finish(engine)
    while engine.tokens_sampled < 15:
        engine.step()
    return engine, {}


# ── What a fork costs ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("at", "copies"), [(12, 0), (16, 0), (13, 8), (15, 8), (3, 8)])
def test_eight_forks_pass_only_new_tokens_and_copy_only_a_page_that_is_partly_theirs(held, at, copies):
    engine, turns = with_source(held=held)
    for i in range(1, 9):
        engine.add(request(i, [], 6, fork_of=0, fork_at=at))
    turns |= finish(engine)
    # The source: its prompt, then all but its last token. A fork: the token before its first, then likewise.
    assert engine.tokens_passed == (10 + 29) + 8 * 6
    assert engine.pages_copied == copies
    sequence = [*PROMPT, *turns[0].tokens.tolist()]
    for i in range(1, 9):
        assert turns[i].context.tolist() == sequence[:at]
        assert (turns[i].stop, len(turns[i].tokens)) == ("length", 6)
        assert events(turns[i]) == [(0, 0, "kept", "start")]
    assert len({turns[i].tokens.tobytes() for i in range(1, 9)}) > 1
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


@pytest.mark.parametrize("held", [False, True])
def test_a_fork_may_go_on_with_tokens_of_its_own(held):
    engine, turns = with_source(held=held)
    passed = 10 + 29
    for i, extra in enumerate(([7], [7, 8], [9, 9, 9, 9, 9, 9]), start=1):
        engine.add(request(i, extra, 5, fork_of=0, fork_at=14))
        passed += len(extra) + 4
    turns |= finish(engine)
    assert engine.tokens_passed == passed
    assert turns[2].context.tolist() == [*PROMPT, *turns[0].tokens[:4].tolist(), 7, 8]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_fork_of_everything_passes_the_last_token_that_its_source_never_did():
    engine, turns = with_source(held=True)
    engine.add(request(1, [], 4, fork_of=0, fork_at=40))
    turns |= finish(engine)
    assert engine.tokens_passed == (10 + 29) + 4
    assert turns[1].context.tolist() == [*PROMPT, *turns[0].tokens.tolist()]
    assert worst_replay(turns) < TOLERANCE


def test_a_fork_of_a_request_that_was_not_admitted_yet_computes_its_context_itself():
    engine = make_engine()
    engine.add(request(0, PROMPT, 5))
    engine.add(request(1, [3], 5, fork_of=0, fork_at=7))
    turns = finish(engine)
    assert turns[1].context.tolist() == [*PROMPT[:7], 3]
    assert worst_replay(turns) < TOLERANCE


def test_truncated_sampling_of_a_fork_has_its_own_supports():
    engine, turns = with_source(held=True)
    for i, sampling in enumerate(TRUNCATING, start=1):
        engine.add(request(i, [], 8, fork_of=0, fork_at=11 + i, sampling=sampling))
    turns |= finish(engine)
    for i, sampling in enumerate(TRUNCATING, start=1):
        assert (turns[i].support is not None) == sampling.truncates
    assert worst_replay(turns) < TOLERANCE


# ── Swaps ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at", [12, 13, 22, 25])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("interrupt", ["keep", "recompute"])
def test_forks_replay_across_swaps_before_while_and_after_they_wait(held, interrupt: Interrupt, at):
    engine, turns = with_source(held=held)
    engine.add(request(1, [], 9, fork_of=0, fork_at=at))
    engine.step()
    engine.add(request(2, [5, 6], 9, fork_of=0, fork_at=at))
    publish(engine, 1, interrupt)
    engine.add(request(3, [], 9, fork_of=0, fork_at=at))
    engine.step()
    engine.add(request(4, [], 9, fork_of=0, fork_at=at + 1))
    publish(engine, 2, interrupt)
    for _ in range(3):
        engine.step()
    engine.add(request(5, [8], 9, fork_of=3, fork_at=at + 2))
    turns |= finish(engine)
    assert turns.keys() == set(range(6))
    assert all(turns[i].tokens.size == 9 for i in range(1, 6))
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_fork_keeps_what_older_weights_computed_and_says_so():
    engine, turns = with_source(held=True)
    publish(engine, 1, "keep")
    engine.add(request(1, [], 4, fork_of=0, fork_at=13))
    engine.add(request(2, [5, 5], 4, fork_of=0, fork_at=13))
    passed = engine.tokens_passed
    turns |= finish(engine)
    # The last shared position is computed again, for its logits under the new weights.
    assert events(turns[1]) == [(0, 0, "kept", "start"), (12, 1, "kept", "fork")]
    assert events(turns[2]) == [(0, 0, "kept", "start"), (13, 1, "kept", "fork")]
    assert engine.tokens_passed - passed == 4 + (2 + 3)
    assert worst_replay(turns) < TOLERANCE


@pytest.mark.parametrize("interrupt", ["recompute", "retry", "resume", "drain"])
def test_after_a_swap_that_recomputes_no_fork_shares_what_older_weights_computed(interrupt: Interrupt):
    engine, turns = with_source(held=True)
    engine.add(request(1, [], 4, fork_of=0, fork_at=13))
    publish(engine, 1, interrupt)
    engine.add(request(2, [], 4, fork_of=0, fork_at=13))
    turns |= finish(engine)
    for i in (1, 2):
        assert turns[i].context.tolist() == [*PROMPT, *turns[0].tokens[:3].tolist()]
        assert events(turns[i]) == [(0, 1, "kept", "start")]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_request_that_is_kept_by_its_own_word_keeps_what_it_shares():
    engine, turns = with_source(held=True)
    engine.add(request(1, [], 4, fork_of=0, fork_at=13, interrupt="keep"))
    publish(engine, 1, "recompute")
    turns |= finish(engine)
    assert events(turns[1]) == [(0, 0, "kept", "start"), (12, 1, "kept", "fork")]
    assert worst_replay(turns) < TOLERANCE


def test_forks_of_forks_replay_through_swaps():
    engine, turns = with_source(held=False)
    rng = np.random.default_rng(0)
    lengths = {0: 10 + 15}
    for i in range(1, 25):
        source = int(rng.choice(list(lengths)))
        at = int(rng.integers(1, lengths[source] + 1))
        extra = rng.integers(0, VOCAB, rng.integers(0, 4))
        engine.add(request(i, extra, 12, fork_of=source, fork_at=at, hold=True))
        lengths[i] = at + len(extra)
        if i % 4 == 0:
            publish(engine, i, "keep" if i % 8 else "recompute")
        turns |= dict(engine.step())
    turns |= finish(engine)
    assert turns.keys() == set(range(25))
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


# ── Room ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_forks_that_wait_lose_what_they_share_when_pages_are_short_and_are_right_all_the_same():
    engine, turns = with_source(held=True, cache_tokens=100, max_running=3)
    for i in range(1, 4):
        engine.add(request(i, np.arange(12) + i, 40))
    engine.step()
    for i in range(4, 12):
        engine.add(request(i, [], 6, fork_of=0, fork_at=20 + i % 4))
    sharing = [s.shared is not None for s in engine._scheduler.queue]
    assert all(sharing[-8:])
    engine.release(0)
    lost = False
    while engine.has_work:
        turns |= dict(engine.step())
        lost |= any(s.shared is None and s.request.fork_of is not None for s in engine._scheduler.queue)
    assert lost
    assert turns.keys() == set(range(12))
    for i in range(4, 12):
        assert turns[i].context.tolist() == [*PROMPT, *turns[0].tokens[: 10 + i % 4].tolist()]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_what_is_held_makes_way_for_a_request_and_can_be_forked_still():
    engine = make_engine(config={"page_size": 4, "cache_tokens": 96, "max_context": 96})
    turns: dict[int, Turn] = {}
    for i in range(4):
        engine.add(request(i, np.arange(14) + i, 10, hold=True))
        turns |= finish(engine)
    engine.add(request(4, range(30), 60))
    turns |= finish(engine)
    for i in range(4):
        engine.add(request(5 + i, [], 5, fork_of=i, fork_at=18))
    turns |= finish(engine)
    for i in range(4):
        assert turns[5 + i].context.tolist() == [*(np.arange(14) + i), *turns[i].tokens[:4].tolist()]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_fork_alone_may_need_the_whole_cache():
    engine = make_engine(config={"page_size": 4, "cache_tokens": 40, "max_context": 40})
    engine.add(request(0, PROMPT, 25, hold=True))
    turns = finish(engine)
    for i, at in enumerate((33, 32, 35), start=1):
        engine.add(request(i, [1, 2], 40, fork_of=0, fork_at=at, hold=True))
    turns |= finish(engine)
    assert [len(turns[i].context) + len(turns[i].tokens) for i in (1, 2, 3)] == [40, 40, 40]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


# ── Holding ──────────────────────────────────────────────────────────────────────────────────────────────


def test_pages_are_held_until_the_release_and_shared_ones_as_long_as_a_fork_needs_them():
    engine, turns = with_source(held=True)
    engine.drop_prefixes()
    assert engine.pages_total - engine.pages_free == 10
    engine.add(request(1, [], 6, fork_of=0, fork_at=24))
    engine.release(0)
    assert engine.pages_total - engine.pages_free == 6
    turns |= finish(engine)
    engine.drop_prefixes()
    assert engine.pages_free == engine.pages_total
    assert worst_replay(turns) < TOLERANCE


def test_a_request_that_is_cut_is_held_too_whether_it_runs_or_waits():
    engine = make_engine(config={"max_running": 2})
    for i in range(3):
        engine.add(request(i, PROMPT, 20, hold=True))
    for _ in range(6):
        engine.step()
    cut = [engine.cut(i) for i in range(3)]
    assert [len(turn.tokens) for turn in cut] == [6, 6, 0]
    for i, turn in enumerate(cut):
        engine.add(request(3 + i, [], 5, fork_of=i, fork_at=10 + len(turn.tokens)))
    turns = finish(engine)
    for i, turn in enumerate(cut):
        assert turns[3 + i].context.tolist() == [*PROMPT, *turn.tokens.tolist()]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_cancelling_forks_and_sources_leaks_nothing():
    engine, _ = with_source(held=False)
    for i in range(1, 9):
        engine.add(request(i, [], 6, fork_of=0, fork_at=15))
    engine.cancel(3)
    engine.step()
    for i in (0, 1, 2):
        engine.cancel(i)
    turns = finish(engine)
    assert turns.keys() == {4, 5, 6, 7, 8}
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"fork_of": 9, "fork_at": 3}, "a fork's source runs or is held"),
        ({"fork_of": 0, "fork_at": 0}, "a fork begins at 1"),
        ({"fork_of": 0, "fork_at": -2}, "a fork begins at 1"),
        ({"fork_of": 0, "fork_at": 41}, "a fork begins at 1 … 40"),
        ({"fork_of": 0, "fork_at": 40, "context": [1] * 60}, "leave no room"),
    ],
)
def test_a_fork_that_cannot_be_served_fails_and_changes_nothing(fields, reason):
    engine, _ = with_source(held=True)
    free = engine.pages_free
    with pytest.raises(EpisodeFailure, match=reason):
        engine.add(request(1, **{"context": [], **fields}))
    assert (engine.waiting, engine.pages_free) == (0, free)
    assert all_free(engine)


def test_a_fork_across_a_swap_finishes_in_a_cache_that_holds_one_sequence():
    engine = make_engine(config={"page_size": 4, "cache_tokens": 12, "max_context": 12, "max_running": 4})
    engine.add(request(0, range(8), 4))
    for _ in range(2):
        engine.step()
    engine.add(request(1, [], 2, fork_of=0, fork_at=9))
    publish(engine, 1, "keep")
    turns = finish(engine)
    assert turns.keys() == {0, 1}
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)
