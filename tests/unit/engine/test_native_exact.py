"""numerics = "exact" on the CPU: the same bits whatever the batch, and the same bits as the trainer's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_builders import MODEL, drive, finish, make_engine, publish, request, requests, with_samplings

from headrace.audit.recompute import replay_logprobs
from headrace.engine.base import SampleRequest, ScoreRequest
from headrace.engine.native import NativeEngine
from headrace.models import CausalLM, ExactOps, PackedContext, random_model
from headrace.records import Turn


def exact_engine(**settings: Any) -> NativeEngine:
    return make_engine(config={"numerics": "exact", "max_context": 160, **settings})


def trainer(version: int = 0) -> CausalLM:
    return random_model(MODEL, seed=1000 + version).use(ExactOps())


def wanted(count: int = 42) -> list[SampleRequest]:
    """Of all samplings, some longer than one block of keys."""
    return with_samplings(requests(count, seed=7, group=3, tokens=(30, 110)))


@pytest.fixture(scope="module")
def crowd() -> dict[int, Turn]:
    return drive(exact_engine(), wanted())


@torch.no_grad()
def recomputed(model: CausalLM, turns: list[Turn]) -> list[np.ndarray]:
    """Every sampled token's log-prob, all turns in one packed pass, as training computes them."""
    whole = [np.concatenate([turn.context, turn.tokens]) for turn in turns]
    tokens_t = torch.from_numpy(np.concatenate(whole).astype(np.int64))
    context = PackedContext([len(one) for one in whole])
    hidden_td = model(tokens_t, context.positions, context)
    out, start = [], 0
    for turn, one in zip(turns, whole, strict=True):
        first, start = start + len(turn.context), start + len(one)
        support = None
        if turn.support is not None:
            support = tuple(torch.from_numpy(x.astype(np.int64)) for x in (turn.support.ids, turn.support.offsets))
        temperature = turn.sampling.temperature or 1.0
        places = slice(first - 1, start - 1)
        scores = model.ops.token_logprobs(
            hidden_td[places], model.head_weight, tokens_t[first:start], temperature, support
        )
        out.append(scores[0].numpy())
    return out


def assert_same_bits(found: Turn, expected: Turn) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    if expected.support is not None:
        np.testing.assert_array_equal(found.support.ids, expected.support.ids)
        np.testing.assert_array_equal(found.support.offsets, expected.support.offsets)


def test_the_trainer_recomputes_thousands_of_log_probs_bit_for_bit(crowd):
    turns = list(crowd.values())
    assert sum(len(turn.tokens) for turn in turns) >= 2000
    assert {turn.sampling.truncates for turn in turns} == {False, True}
    assert max(len(turn.context) + len(turn.tokens) for turn in turns) > 128
    for turn, logprobs in zip(turns, recomputed(trainer(), turns), strict=True):
        np.testing.assert_array_equal(turn.logprobs, logprobs)


def test_a_request_alone_gives_the_same_bits_as_in_a_crowd(crowd):
    for one in wanted()[::6]:
        assert_same_bits(drive(exact_engine(), [one])[one.id], crowd[one.id])


@pytest.mark.parametrize(
    "settings",
    [{"cache_tokens": 400}, {"prefill_tokens": 5, "max_running": 9}, {"page_size": 24}],
    ids=["preempted", "in small chunks", "other pages"],
)
def test_neither_preemption_nor_chunks_nor_pages_change_a_bit(crowd, settings):
    turns = drive(exact_engine(**settings), wanted(21))
    causes = {event.cause for turn in turns.values() for event in turn.lineage}
    assert ("preempt" in causes) == ("cache_tokens" in settings)
    for id, turn in turns.items():
        assert_same_bits(turn, crowd[id])


def test_the_number_of_threads_does_not_change_a_bit(crowd):
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    one = wanted()[0]
    try:
        turn = drive(exact_engine(), [request(one.id, one.context, 8, sampling=one.sampling)])[one.id]
    finally:
        torch.set_num_threads(before)
    assert turn.tokens.tolist() == crowd[one.id].tokens[:8].tolist()
    np.testing.assert_array_equal(turn.logprobs, crowd[one.id].logprobs[:8])


def test_after_a_swap_that_recomputes_one_pass_of_the_new_weights_gives_the_new_tokens_bits():
    engine = exact_engine()

    def between(step: int) -> None:
        if step == 25:
            publish(engine, 1, "recompute")

    turns = list(drive(engine, wanted(12), between).values())
    per_version = [recomputed(trainer(version), turns) for version in (0, 1)]
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1}
    for place, turn in enumerate(turns):
        for version in (0, 1):
            under = turn.versions == version
            np.testing.assert_array_equal(turn.logprobs[under], per_version[version][place][under])


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_record_replays_through_swaps_bit_for_bit(kv):
    engine = exact_engine(cache_tokens=500)
    models = {version: trainer(version) for version in range(3)}

    def between(step: int) -> None:
        if step in (10, 30):
            publish(engine, engine.version + 1, kv)

    for turn in drive(engine, wanted(9), between).values():
        again = replay_logprobs(models.__getitem__, turn.context, turn)
        np.testing.assert_array_equal(turn.logprobs, again)


def test_given_tokens_are_scored_with_the_bits_they_were_sampled_with():
    engine = exact_engine(prefill_tokens=17)
    turn = drive(engine, [request(0, range(12), 60)])[0]
    engine.score(ScoreRequest(id=1, context=turn.context, tokens=turn.tokens))
    np.testing.assert_array_equal(finish(engine)[1].logprobs, turn.logprobs)
