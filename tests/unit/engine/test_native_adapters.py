"""Requests with adapters of their own in one batch: what each samples is what PEFT's model says."""

from __future__ import annotations

from dataclasses import replace

import adapter_builders
import engine_builders
import msgspec
import numpy as np
import pytest
import torch
from adapter_builders import A, B, fill_adapter, make_engine, model_of, peft_model, publish_adapter, worst_replay
from engine_builders import (
    MODEL,
    TOLERANCE,
    VOCAB,
    all_free,
    drive,
    events,
    finish,
    plain_logprobs,
    request,
    requests,
    with_samplings,
)

from headrace.engine.base import SampleRequest, ScoreRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine, core, graphs
from headrace.errors import EpisodeFailure
from headrace.models import random_model
from headrace.records import Turn

NAMES = (None, "a", "b")


def mixed(wanted: list[SampleRequest]) -> list[SampleRequest]:
    """The same with the base and both adapters in turn, also within a group."""
    return [msgspec.structs.replace(one, adapter=NAMES[i % 3]) for i, one in enumerate(wanted)]


def refused(engine, wanted: SampleRequest | ScoreRequest, reason: str, match: str) -> None:
    with pytest.raises(EpisodeFailure, match=match) as caught:
        engine.score(wanted) if isinstance(wanted, ScoreRequest) else engine.add(wanted)
    assert caught.value.reason == reason


# ── One batch ────────────────────────────────────────────────────────────────────────────────────────────


def test_in_a_mixed_batch_each_log_prob_is_that_of_its_own_peft_model():
    # With weights as large as the other tests', roundings alone come to three times the tolerance here.
    mild = replace(MODEL, initializer_range=0.1)
    config = NativeEngineConfig(max_running=64, max_context=96, max_adapters=2, max_adapter_rank=8)
    engine = NativeEngine(random_model(mild, seed=1000), config, version=0)
    models = {None: random_model(mild, seed=1000)}
    for spec in (A, B):
        models[spec.name] = peft_model(spec, 1, shape=mild)
        fill_adapter(engine, spec, models[spec.name])
        engine.swap_adapter(spec.name, 1)
    turns = drive(engine, mixed(requests(60, seed=0)))
    assert sum(len(turn.tokens) for turn in turns.values()) > 2000
    for id, turn in turns.items():
        name, rows = NAMES[id % 3], np.arange(len(turn.tokens))
        assert turn.adapter == name
        assert set(turn.versions.tolist()) == ({0} if name is None else {1})
        np.testing.assert_allclose(turn.logprobs, plain_logprobs(models[name], turn)[rows, turn.tokens], atol=1e-5)
        if name is not None:
            assert np.abs(turn.logprobs - plain_logprobs(models[None], turn)[rows, turn.tokens]).max() > 1e-2


def test_an_adapter_matters():
    turns = drive(make_engine(), mixed([request(i, range(5), 30, seed=1) for i in range(3)]))
    for one in turns.values():
        for other in turns.values():
            if one is not other:
                expected = plain_logprobs(model_of(other.adapter, 1, 0), one)[np.arange(30), one.tokens]
                assert np.abs(one.logprobs - expected).max() > 0.5


def test_beside_adapters_the_base_gives_the_same_bits_as_without_any():
    wanted = [request(i, np.arange(3 + i) % VOCAB, 25) for i in range(12)]
    without = drive(engine_builders.make_engine(), wanted)
    beside = drive(make_engine(), mixed(wanted))
    alone = drive(make_engine(), wanted)
    for id in range(12):
        for turn in [alone[id], *([beside[id]] if NAMES[id % 3] is None else [])]:
            assert turn.tokens.tolist() == without[id].tokens.tolist()
            assert turn.logprobs.tobytes() == without[id].logprobs.tobytes()
            assert events(turn) == [(0, 0, "kept", "start")]
            assert turn.lineage[0].base is None


def test_log_probs_hold_under_preemption_chunks_and_truncated_sampling():
    engine = make_engine(config={"cache_tokens": 320, "prefill_tokens": 24})
    turns = drive(engine, mixed(with_samplings(requests(60, seed=4))))
    assert sum(event.cause == "preempt" for turn in turns.values() for event in turn.lineage) > 20
    assert worst_replay(turns) < TOLERANCE
    for turn in turns.values():
        assert {event.base for event in turn.lineage} == ({None} if turn.adapter is None else {0})
    assert all_free(engine)


def test_scores_are_those_of_the_adapter():
    engine = make_engine(config={"prefill_tokens": 7})
    turns = drive(engine, mixed([request(i, range(9), 20) for i in range(3)]))
    for id, turn in turns.items():
        for other, name in enumerate(NAMES):
            wanted = ScoreRequest(id=10 * id + other + 100, context=turn.context, tokens=turn.tokens, adapter=name)
            engine.score(wanted)
    scored = finish(engine)
    assert len(scored) == 9
    for number, turn in scored.items():
        name = NAMES[(number - 100) % 10]
        expected = plain_logprobs(model_of(name, 1, 0), turn)[np.arange(20), turn.tokens]
        np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE)
        assert (turn.adapter, set(turn.versions.tolist())) == (name, {0} if name is None else {1})
    assert all_free(engine)


def test_a_float8_cache_goes_with_adapters():
    engine = make_engine(config={"kv_dtype": "fp8"})
    turns = drive(engine, mixed([request(i, range(9), 20) for i in range(6)]))
    apart = [np.abs(adapter_builders.replayed(turn) - turn.logprobs).mean() for turn in turns.values()]
    assert 1e-4 < np.mean(apart) < 0.3


# ── Sharing ──────────────────────────────────────────────────────────────────────────────────────────────


def prefilled(engine, *wanted: SampleRequest) -> int:
    before = engine.tokens_prefilled
    drive(engine, list(wanted))
    return engine.tokens_prefilled - before


def test_a_beginning_is_shared_within_an_adapter_and_not_with_another():
    engine, ids = make_engine(), iter(range(100))
    context = np.random.default_rng(0).integers(0, VOCAB, 40)

    def ask(name: str | None) -> SampleRequest:
        return request(next(ids), context, 3, adapter=name)

    for name in NAMES:
        # A group asks for one prompt at once: one computes it.
        assert prefilled(engine, *(ask(name) for _ in range(4))) == 40
    for name in NAMES:
        assert prefilled(engine, ask(name)) == 0
    publish_adapter(engine, "a", 2)
    assert prefilled(engine, ask(None), ask("b")) == 0
    assert prefilled(engine, ask("a")) == 40
    assert prefilled(engine, ask("a")) == 0


def test_a_group_in_one_step_computes_its_prompt_once_for_each_adapter():
    engine = make_engine()
    wanted = [request(i, np.arange(20), 6, adapter=NAMES[i % 3]) for i in range(12)]
    assert prefilled(engine, *wanted) == 60
    assert worst_replay(drive(make_engine(), wanted)) < TOLERANCE


def test_a_fork_goes_on_with_its_sources_adapter_and_pages():
    engine = make_engine()
    source = drive(engine, [request(0, range(12), 20, adapter="a", hold=True)])[0]
    passed = engine.tokens_passed
    engine.add(request(1, [5], 10, fork_of=0, fork_at=25, adapter="a"))
    turn = finish(engine)[1]
    assert engine.tokens_passed - passed <= 12
    assert turn.context.tolist() == [*source.context.tolist(), *source.tokens[:13].tolist(), 5]
    assert (turn.adapter, events(turn)) == ("a", [(0, 1, "kept", "start")])
    assert worst_replay({1: turn}) < TOLERANCE
    for other in (None, "b"):
        wanted = request(2, [5], 10, fork_of=0, fork_at=25, adapter=other)
        refused(engine, wanted, "bad_request", f"a fork has its source's adapter, 'a' .got {other!r}.")
    assert all_free(engine)


def test_a_fork_of_what_an_older_adapter_computed_says_so():
    engine = make_engine()
    drive(engine, [request(0, range(12), 20, adapter="a", hold=True)])
    publish_adapter(engine, "b", 2)
    engine.add(request(1, [5], 10, fork_of=0, fork_at=25, adapter="a"))
    publish_adapter(engine, "a", 2)
    engine.add(request(2, [], 10, fork_of=0, fork_at=25, adapter="a"))
    turns = finish(engine)
    assert events(turns[1]) == [(0, 1, "kept", "start"), (25, 2, "kept", "fork")]
    # Its last position is computed again, for the logits of the first new token.
    assert events(turns[2]) == [(0, 1, "kept", "start"), (24, 2, "kept", "fork")]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


# ── What cannot be served ────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_adapter_fails_its_request_alone():
    engine = make_engine(resident=["a"])
    engine.adapter_standby(B)
    engine.add(request(0, range(5), 9, adapter="a"))
    score = ScoreRequest(id=1, context=np.array([1]), tokens=np.array([2]), adapter="b")
    for wanted in (request(1, adapter="c"), request(1, adapter="b"), score):
        why = rf"engine has adapters \['a'\] of at most engine.max_adapters = 2 \(got '{wanted.adapter}'\)"
        refused(engine, wanted, "unknown_adapter", why)
    refused(engine_builders.make_engine(), request(0, adapter="a"), "unknown_adapter", r"adapters \[\] of at most")
    turn = finish(engine)[0]
    assert (len(turn.tokens), turn.adapter) == (9, "a")


def test_a_turn_that_was_begun_goes_on_with_its_adapter():
    engine = make_engine()
    whole = drive(engine, [request(0, range(6), 20, adapter="a")])[0]
    engine.add(request(0, range(6), 20, adapter="a"))
    for _ in range(8):
        engine.step()
    cut = engine.cut(0)
    assert cut is not None
    assert (cut.adapter, len(cut.tokens)) == ("a", 8)
    wrong = request(0, range(6), 20, adapter="b", begun=cut)
    refused(engine, wrong, "bad_request", "resumed with its adapter, 'a' .got 'b'.")
    turn = drive(engine, [request(0, range(6), 20, adapter="a", begun=cut)])[0]
    assert turn.tokens.tolist() == whole.tokens.tolist()
    assert events(turn) == [(0, 1, "kept", "start"), (13, 1, "recomputed", "resume")]
    assert worst_replay({0: turn}) < TOLERANCE


# ── The GPU's runner, in Triton's interpreter ────────────────────────────────────────────────────────────


@pytest.fixture
def make_fused(monkeypatch):
    """Engines over it, where its kernels run."""

    def make(**options) -> NativeEngine:
        with monkeypatch.context() as patched:
            patched.setattr(core, "open_runner", graphs.GraphRunner)
            return make_engine(device="cuda" if torch.cuda.is_available() else "cpu", **options)

    if not torch.cuda.is_available():
        # The interpreter takes its time for programs with nothing to do.
        monkeypatch.setattr(graphs, "SPLIT_PROGRAMS", 2)
    return make


def test_both_runners_agree_on_adapters(make_fused):
    config = {"prefill_tokens": 20, "max_running": 7}
    reference, fused = make_engine(config=config), make_fused(config=config)
    wanted = mixed(with_samplings(requests(14, seed=3, group=3, tokens=(1, 12))))
    expected, turns = drive(reference, wanted), drive(fused, wanted)
    for id, turn in turns.items():
        assert turn.tokens.tolist() == expected[id].tokens.tolist()
        assert np.abs(turn.logprobs - expected[id].logprobs).max() < 1e-4
    assert worst_replay(turns) < 1e-4
    assert all_free(fused)


def test_steps_begun_before_an_adapters_swap_carry_its_older_version(make_fused):
    engine = make_fused(config={"prefill_tokens": 16})

    def between(step: int) -> None:
        if step in (4, 8):
            publish_adapter(engine, "a", engine.adapters["a"] + 1, "keep" if step == 4 else "recompute")

    turns: dict[int, Turn] = drive(engine, mixed(requests(6, seed=5, group=2, tokens=(10, 14))), between)
    assert {int(v) for turn in turns.values() if turn.adapter == "a" for v in turn.versions} == {1, 2, 3}
    assert {int(v) for turn in turns.values() if turn.adapter == "b" for v in turn.versions} == {1}
    assert worst_replay(turns) < 1e-4
