"""Every sampled token's log-prob, recomputed from its turn's record alone."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from engine_builders import (
    TOLERANCE,
    all_free,
    drive,
    make_engine,
    plain_logprobs,
    publish,
    request,
    requests,
    version_of,
    with_samplings,
    worst_replay,
)

from headrace.audit.recompute import replay_logprobs
from headrace.engine.native import attention
from headrace.errors import RecordError
from headrace.records import KvEvent, Turn


def test_ten_thousand_tokens_have_the_log_prob_that_one_plain_pass_over_their_sequence_gives():
    turns = drive(make_engine(), requests(280, seed=0))
    assert sum(len(turn.tokens) for turn in turns.values()) >= 10_000
    for turn in turns.values():
        expected = plain_logprobs(version_of(0), turn)[np.arange(len(turn.tokens)), turn.tokens]
        np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE)
        assert turn.lineage[0].version == 0
        assert len(turn.lineage) == 1
    assert worst_replay(turns) < TOLERANCE


@pytest.mark.parametrize(("worth", "most"), [(1, 2**26), (2**26, 2**12), (1, 1)])
def test_log_probs_do_not_depend_on_how_a_decode_pass_groups_its_rows(monkeypatch, worth, most):
    monkeypatch.setitem(attention.WORTH_A_GROUP_BYTES, "cpu", worth)
    monkeypatch.setitem(attention.MOST_GATHERED_BYTES, "cpu", most)
    groups = 0
    whole = attention.group_rows

    def count(*arguments: Any) -> list[tuple[int, int, int]]:
        nonlocal groups
        groups = max(groups, len(runs := whole(*arguments)))
        return runs

    monkeypatch.setattr(attention, "group_rows", count)
    turns = drive(make_engine(), requests(64, seed=4))
    assert groups > 5
    for turn in turns.values():
        expected = plain_logprobs(version_of(0), turn)[np.arange(len(turn.tokens)), turn.tokens]
        np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE)


def test_with_truncation_a_log_prob_is_the_plain_one_renormalised_over_the_recorded_support():
    turns = drive(make_engine(), with_samplings(requests(280, seed=1)))
    assert sum(len(turn.tokens) for turn in turns.values()) >= 10_000
    for turn in turns.values():
        if turn.support is None:
            continue
        for t, row in enumerate(plain_logprobs(version_of(0), turn)):
            inside = row[turn.support.row(t)]
            expected = row[turn.tokens[t]] - np.logaddexp.reduce(inside)
            assert turn.tokens[t] in turn.support.row(t)
            if turn.sampling.temperature > 0:
                assert abs(turn.logprobs[t] - expected) < TOLERANCE
            else:
                assert turn.logprobs[t] == 0
                assert turn.support.row(t).tolist() == [row.argmax()]
    assert worst_replay(turns) < TOLERANCE


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_log_probs_replay_through_swaps_in_the_middle_of_sequences(kv):
    engine = make_engine()
    version = 0

    def swap_every_seventh(step: int) -> None:
        nonlocal version
        if step % 7 == 6:
            version += 1
            publish(engine, version, kv)

    turns = drive(engine, with_samplings(requests(320, seed=2)), swap_every_seventh)
    assert sum(len(turn.tokens) for turn in turns.values()) >= 10_000
    assert sum(len(set(turn.versions.tolist())) > 2 for turn in turns.values()) > 100
    assert worst_replay(turns) < TOLERANCE


def test_log_probs_replay_under_preemption_and_swaps_of_both_kinds():
    engine = make_engine(config={"cache_tokens": 400, "max_context": 96, "prefill_tokens": 64})
    version = 0

    def swap_now_and_then(step: int) -> None:
        nonlocal version
        if step % 23 == 22:
            version += 1
            publish(engine, version, "keep" if version % 3 else "recompute")

    turns = drive(engine, with_samplings(requests(128, seed=3)), swap_now_and_then)
    causes = [event.cause for turn in turns.values() for event in turn.lineage]
    assert causes.count("preempt") > 30
    assert causes.count("swap") > 30
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_added_cut_cancelled_and_swapped_every_turn_replays_and_no_page_is_lost(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 3, 4, 16]))
    engine = make_engine(config={"page_size": size, "cache_tokens": 130, "max_running": 9, "prefill_tokens": 40})
    coming = with_samplings(requests(60, seed=seed, group=3, tokens=(1, 50)))
    turns: dict[int, Turn] = {}
    version = 0
    gone: set[int] = set()
    known = [one.id for one in coming]
    while coming or engine.has_work:
        for _ in range(min(len(coming), int(rng.integers(0, 4)))):
            engine.add(coming.pop())
        if rng.random() < 0.05:
            version += 1
            publish(engine, version, "keep" if rng.random() < 0.5 else "recompute")
        if rng.random() < 0.03:
            turn = engine.cut(victim := int(rng.choice(known)))
            if turn is not None:
                turns[victim] = turn
        if rng.random() < 0.02:
            before = engine.running + engine.waiting
            engine.cancel(victim := int(rng.choice(known)))
            if engine.running + engine.waiting < before:
                gone.add(victim)
        turns.update(engine.step())
    assert turns.keys() | gone == set(known)
    assert worst_replay({id: turn for id, turn in turns.items() if len(turn.tokens)}) < TOLERANCE
    assert all_free(engine)


def test_a_wrong_lineage_gives_other_log_probs():
    engine = make_engine()
    turn = drive(
        engine,
        [request(0, range(20), 40)],
        lambda step: publish(engine, step // 10, "keep") if step and step % 10 == 0 else None,
    )[0]
    assert np.abs(replay_logprobs(version_of, turn.context, turn) - turn.logprobs).max() < TOLERANCE
    rebuilt = tuple(
        KvEvent(position=e.position, version=e.version, before="recomputed", cause=e.cause) for e in turn.lineage
    )
    lie = msgspec.structs.replace(turn, lineage=rebuilt)
    assert np.abs(replay_logprobs(version_of, turn.context, lie) - turn.logprobs).max() > 0.01


def test_a_record_that_contradicts_itself_is_refused():
    turn = drive(make_engine(), [request(0, max_tokens=5)])[0]
    wrong_version = msgspec.structs.replace(turn, versions=turn.versions + 1)
    with pytest.raises(RecordError, match="sampled under their lineage's version"):
        replay_logprobs(version_of, turn.context, wrong_version)
    with pytest.raises(RecordError, match="starts at position 0"):
        replay_logprobs(version_of, turn.context, msgspec.structs.replace(turn, lineage=()))
