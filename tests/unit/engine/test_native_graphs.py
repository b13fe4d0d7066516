"""The GPU's runner, in Triton's interpreter where there is no GPU: the same engine, the same tokens."""

from __future__ import annotations

import engine_builders
import numpy as np
import pytest
import torch
from engine_builders import all_free, drive, finish, publish, request, requests, with_samplings, worst_replay

from headrace.engine.base import ScoreRequest
from headrace.engine.native import core, graphs


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes its time for programs with nothing to do."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(graphs, "SPLIT_PROGRAMS", 2)


def make_engine(**options):
    """Where the kernels run."""
    return engine_builders.make_engine(device="cuda" if torch.cuda.is_available() else "cpu", **options)


@pytest.fixture
def fused(monkeypatch):
    """Engines made from here on use it."""
    monkeypatch.setattr(core, "open_runner", graphs.GraphRunner)


def make_both(monkeypatch, **options):
    reference = engine_builders.make_engine(**options)
    monkeypatch.setattr(core, "open_runner", graphs.GraphRunner)
    return reference, make_engine(**options)


@pytest.mark.parametrize("cache_tokens", [None, 130])
def test_both_runners_sample_the_same_tokens_with_the_same_log_probs(monkeypatch, cache_tokens):
    config = {"cache_tokens": cache_tokens, "prefill_tokens": 20, "max_running": 7}
    reference, fused = make_both(monkeypatch, config=config)
    wanted = with_samplings(requests(14, seed=3, group=3, tokens=(1, 12)))
    expected, turns = drive(reference, wanted), drive(fused, wanted)
    for id, turn in turns.items():
        assert turn.tokens.tolist() == expected[id].tokens.tolist()
        assert np.abs(turn.logprobs - expected[id].logprobs).max() < 1e-4
        assert (turn.support is None) == (expected[id].support is None)
        if turn.support is not None:
            assert turn.support.ids.tolist() == expected[id].support.ids.tolist()
            assert turn.support.offsets.tolist() == expected[id].support.offsets.tolist()
    assert all_free(fused)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_carry_the_version_whose_weights_sampled_them(fused, kv):
    engine = make_engine(config={"prefill_tokens": 16})

    def between(step):
        if step in (4, 8):
            publish(engine, engine.version + 1, kv)

    turns = drive(engine, requests(6, seed=5, group=2, tokens=(10, 14)), between)
    assert {int(v) for turn in turns.values() for v in turn.versions} == {0, 1, 2}
    assert worst_replay(turns) < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there they need bfloat16: tests/gpu/test_fp8.py")
def test_both_runners_agree_on_fp8_projections(monkeypatch):
    reference, fused = make_both(monkeypatch, config={"prefill_tokens": 16, "weight_dtype": "fp8"})
    wanted = requests(6, seed=5, group=2, tokens=(10, 14))

    def turns_of(engine):
        return drive(engine, wanted, lambda step: publish(engine, 1, "keep") if step == 5 else None)

    expected, turns = turns_of(reference), turns_of(fused)
    for id, turn in turns.items():
        assert turn.tokens.tolist() == expected[id].tokens.tolist()
        assert np.abs(turn.logprobs - expected[id].logprobs).max() < 1e-4


def test_a_stop_token_ends_a_turn_although_another_step_was_begun(fused):
    long = drive(make_engine(), [request(0, max_tokens=20)])[0]
    stop = int(long.tokens[7])
    first = long.tokens.tolist().index(stop)
    turn = drive(make_engine(), [request(0, max_tokens=20, stop_tokens=(stop,))])[0]
    assert turn.stop == "end"
    assert turn.tokens.tolist() == long.tokens[: first + 1].tolist()


def test_given_tokens_are_scored_as_they_were_sampled(fused):
    engine = make_engine(config={"prefill_tokens": 7})
    turn = drive(engine, [request(0, range(12), 9)])[0]
    engine.score(ScoreRequest(id=1, context=turn.context, tokens=turn.tokens))
    assert np.abs(finish(engine)[1].logprobs - turn.logprobs).max() < 1e-4
    assert all_free(engine)
