"""An engine that gives its memory away and takes it back finishes what it had begun."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch
from engine_builders import (
    MODEL,
    TOLERANCE,
    all_free,
    drive,
    events,
    fill_standby,
    finish,
    make_engine,
    publish,
    request,
    requests,
    version_of,
    with_samplings,
    worst_replay,
)

from headrace.engine.base import ScoreRequest
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine, core, graphs
from headrace.errors import HeadraceError, LawBroken, SyncError
from headrace.models import ModelConfig, random_model
from headrace.records import Turn


def nap(engine: NativeEngine, *, keep_weights: bool, version: int | None = None) -> None:
    """Sleep and wake, with this version written meanwhile."""
    engine.sleep(keep_weights=keep_weights)
    assert engine.asleep
    assert (engine.running, engine.pages_free) == (0, engine.pages_total)
    if version is not None:
        publish(engine, version, "keep")
    engine.wake()
    assert not engine.asleep


def at_steps(wanted: set[int], what: Callable[[], None]) -> Callable[[int], None]:
    return lambda step: what() if step in wanted else None


@pytest.mark.parametrize("cache_tokens", [None, 160])
@pytest.mark.parametrize("keep_weights", [True, False])
def test_sleeping_in_mid_generation_changes_no_token(keep_weights, cache_tokens):
    crowd = with_samplings(requests(28, seed=5))
    undisturbed = drive(make_engine(), crowd)
    engine = make_engine(config={"cache_tokens": cache_tokens, "prefill_tokens": 40})
    # Without its weights it is sent the same version again.
    version = None if keep_weights else 0
    turns = drive(
        engine, crowd, at_steps({1, 9, 10, 30}, lambda: nap(engine, keep_weights=keep_weights, version=version))
    )
    for id, turn in turns.items():
        assert turn.tokens.tolist() == undisturbed[id].tokens.tolist()
        np.testing.assert_allclose(turn.logprobs, undisturbed[id].logprobs, atol=TOLERANCE)
    assert sum(event.cause == "sleep" for turn in turns.values() for event in turn.lineage) > 10
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_steps_begun_ahead_are_taken_in_before_it_sleeps(monkeypatch):
    wanted = requests(5, seed=2, group=2, tokens=(6, 9))
    undisturbed = drive(make_engine(), wanted)
    if not torch.cuda.is_available():
        # Triton's interpreter takes its time for programs with nothing to do.
        monkeypatch.setattr(graphs, "SPLIT_PROGRAMS", 2)
    monkeypatch.setattr(core, "open_runner", graphs.GraphRunner)
    engine = make_engine(config={"max_running": 4})
    turns = drive(engine, wanted, at_steps({2, 6}, lambda: nap(engine, keep_weights=False, version=0)))
    for id, turn in turns.items():
        assert turn.tokens.tolist() == undisturbed[id].tokens.tolist()
    assert any(event.cause == "sleep" for turn in turns.values() for event in turn.lineage)
    assert worst_replay(turns) < TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_whatever_else_happens_between_naps_every_turn_replays_and_no_page_is_lost(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 3, 4, 16]))
    engine = make_engine(config={"page_size": size, "cache_tokens": 130, "max_running": 9, "prefill_tokens": 40})
    coming = with_samplings(requests(60, seed=seed, group=3, tokens=(1, 50)))
    turns: dict[int, Turn] = {}
    version, naps, gone = 0, 0, set()
    known = [one.id for one in coming]
    while coming or engine.has_work or engine.asleep:
        for _ in range(min(len(coming), int(rng.integers(0, 4)))):
            engine.add(coming.pop())
        if not engine.asleep and rng.random() < 0.1:
            engine.sleep(keep_weights=bool(rng.random() < 0.5))
            naps += 1
        if rng.random() < 0.1:
            version += 1
            publish(engine, version, "keep" if rng.random() < 0.5 else "recompute")
        if rng.random() < 0.05:
            turn = engine.cut(victim := int(rng.choice(known)))
            if turn is not None:
                turns[victim] = turn
        if rng.random() < 0.03:
            before = engine.running + engine.waiting
            engine.cancel(victim := int(rng.choice(known)))
            if engine.running + engine.waiting < before:
                gone.add(victim)
        if engine.asleep and engine._served.base.complete and rng.random() < 0.5:
            engine.wake()
        turns.update(engine.step())
    assert naps > 10
    assert turns.keys() | gone == set(known)
    assert worst_replay({id: turn for id, turn in turns.items() if len(turn.tokens)}) < TOLERANCE
    assert all_free(engine)


def test_what_slept_is_rebuilt_as_a_whole_under_the_version_of_its_return():
    engine = make_engine()
    engine.add(request(0, range(5), 8))
    for _ in range(3):
        engine.step()
    nap(engine, keep_weights=False, version=7)
    turn = finish(engine)[0]
    assert turn.versions.tolist() == [0, 0, 0, 7, 7, 7, 7, 7]
    # Three tokens were sampled; the third had not passed through the model.
    assert events(turn) == [(0, 0, "kept", "start"), (7, 7, "recomputed", "sleep")]
    assert worst_replay({0: turn}) < TOLERANCE


def test_what_had_sampled_nothing_yet_begins_again():
    engine = make_engine(config={"prefill_tokens": 4})
    engine.add(request(0, range(10), 3))
    engine.step()
    assert engine.running == 1
    nap(engine, keep_weights=True)
    turn = finish(engine)[0]
    assert events(turn) == [(0, 0, "kept", "start")]
    assert turn.tokens.tolist() == drive(make_engine(), [request(0, range(10), 3)])[0].tokens.tolist()


def test_the_oldest_returns_first():
    engine = make_engine(config={"max_running": 4})
    for i in range(7):
        engine.add(request(i, [i, 3, 4], 20))
    engine.step()
    engine.step()
    engine.sleep()
    assert [sequence.request.id for sequence in engine._scheduler.queue] == list(range(7))


@pytest.mark.parametrize("keep_weights", [True, False])
def test_versions_are_published_while_it_sleeps(keep_weights):
    engine = make_engine()
    wanted = requests(12, seed=3)
    for one in wanted:
        engine.add(one)
    for _ in range(10):
        engine.step()
    engine.sleep(keep_weights=keep_weights)
    for version in (1, 2):
        report_before = engine.version
        publish(engine, version, "keep")
        assert (report_before, engine.version) == (version - 1, version)
    engine.wake()
    turns = finish(engine)
    assert {int(v) for turn in turns.values() for v in turn.versions} == {0, 2}
    assert worst_replay(turns) < TOLERANCE
    publish(engine, 3, "keep")
    assert worst_replay(drive(engine, requests(4, seed=9))) < TOLERANCE


def test_without_weights_it_does_not_wake_until_a_version_was_swapped_in():
    engine = make_engine(version=4)
    engine.add(request(0, range(5), 8))
    engine.step()
    engine.sleep(keep_weights=False)
    with pytest.raises(HeadraceError, match=r"none since version 4.*fill the standby buffers and swap"):
        engine.wake()
    with pytest.raises(HeadraceError, match="nothing since the weights were given up"):
        engine.swap(5)
    fill_standby(engine, 5)
    with pytest.raises(HeadraceError, match="none since version 4"):
        engine.wake()
    with pytest.raises(SyncError, match="nothing is in standby"):
        engine.swap(5, only=["model.norm.weight"])
    assert (engine.asleep, engine.version) == (True, 4)
    engine.swap(5)
    engine.wake()
    assert worst_replay(finish(engine)) < TOLERANCE


def test_asleep_it_takes_requests_in_and_lets_them_go():
    engine = make_engine()
    whole = drive(make_engine(), [request(i, range(i + 3), 9) for i in range(6)])
    for i in range(4):
        engine.add(request(i, range(i + 3), 9))
    for _ in range(4):
        engine.step()
    engine.sleep()
    for i in (4, 5):
        engine.add(request(i, range(i + 3), 9))
    engine.cancel(1)
    engine.cancel(4)
    cut = engine.cut(2)
    assert cut is not None
    assert (cut.stop, cut.tokens.tolist()) == ("cancelled", whole[2].tokens[:4].tolist())
    assert not engine.has_work
    assert engine.step() == []
    steps = engine.steps
    assert engine.step() == []
    assert (engine.steps, engine.running, engine.waiting) == (steps, 0, 3)
    engine.wake()
    turns = finish(engine)
    assert turns.keys() == {0, 3, 5}
    for id, turn in turns.items():
        assert turn.tokens.tolist() == whole[id].tokens.tolist()
    # A turn that was cut asleep is taken up like any other.
    resumed = drive(engine, [request(2, range(5), 9, begun=cut)])[2]
    assert resumed.tokens.tolist() == whole[2].tokens.tolist()


def test_what_had_ended_is_returned_asleep():
    engine = make_engine()
    engine.add(request(0, max_tokens=3))
    engine.add(request(1, max_tokens=9, interrupt="resume"))
    engine.step()
    engine.step()
    publish(engine, 1, "keep")
    engine.sleep()
    assert engine.has_work
    assert [(id, turn.stop) for id, turn in engine.step()] == [(1, "cancelled")]
    assert not engine.has_work


def test_forks_and_held_pages_are_given_up_and_their_tokens_stay():
    engine = make_engine(config={"max_running": 2})
    engine.add(request(0, range(9), 6, hold=True))
    held = finish(engine)[0]
    engine.add(request(1, range(9), 30))
    engine.add(request(2, range(4), 30))
    for _ in range(5):
        engine.step()
    engine.add(request(3, [], 4, fork_of=0, fork_at=12))
    engine.add(request(4, [], 4, fork_of=1, fork_at=11))
    nap(engine, keep_weights=True)
    engine.add(request(5, [7], 4, fork_of=0, fork_at=15))
    engine.sleep()
    engine.add(request(6, [], 4, fork_of=2, fork_at=5))
    engine.wake()
    turns = finish(engine)
    whole = [*range(9), *held.tokens.tolist()]
    assert turns[3].context.tolist() == whole[:12]
    assert turns[4].context.tolist() == [*range(9), *turns[1].tokens[:2].tolist()]
    assert turns[5].context.tolist() == [*whole, 7]
    assert turns[6].context.tolist() == [*range(4), int(turns[2].tokens[0])]
    assert [events(turns[i]) for i in (3, 4, 5, 6)] == [[(0, 0, "kept", "start")]] * 4
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_scoring_goes_on_after_sleep():
    turn = drive(make_engine(), [request(0, range(12), 20)])[0]
    engine = make_engine(config={"prefill_tokens": 7})
    engine.score(ScoreRequest(id=1, context=turn.context, tokens=turn.tokens))
    for _ in range(3):
        engine.step()
    nap(engine, keep_weights=True)
    scored = finish(engine)[1]
    np.testing.assert_allclose(scored.logprobs, turn.logprobs, atol=TOLERANCE)


def test_sleeping_twice_and_waking_twice_is_sleeping_and_waking():
    engine = make_engine()
    engine.add(request(0, range(5), 8))
    engine.step()
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()
    assert worst_replay(finish(engine)) < TOLERANCE
    engine.sleep(keep_weights=True)
    engine.sleep(keep_weights=False)
    with pytest.raises(HeadraceError, match="is given new ones"):
        engine.wake()


def test_it_is_not_put_to_sleep_within_a_pass():
    engine = make_engine()
    engine.add(request(0, range(5), 6))
    engine._model.model.layers[0].register_forward_hook(lambda *_: engine.sleep())
    with pytest.raises(LawBroken, match="put to sleep within a forward pass"):
        engine.step()


def test_the_addresses_are_the_same_after_waking():
    engine = make_engine()

    def addresses() -> list[int]:
        cache = [tensor.data_ptr() for layer in range(MODEL.num_layers) for tensor in engine._kv.layer(layer)]
        live = [parameter.data_ptr() for parameter in engine._model.parameters()]
        return [*cache, *live, *(buffer.data_ptr() for buffer in engine.standby.values())]

    before = addresses()
    nap(engine, keep_weights=True)
    assert addresses() == before
    for (name, live), expected in zip(engine._model.named_parameters(), version_of(0).parameters(), strict=True):
        assert torch.equal(live, expected), name


@pytest.mark.parametrize("keep_weights", [True, False])
def test_the_memory_of_cache_and_weights_is_really_given_back(keep_weights):
    def used() -> int:
        gc.collect()
        # What was freed before stays in the process, and would be taken for what is kept on the host.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)
        return psutil.Process().memory_info().rss

    model = ModelConfig(
        family="qwen3",
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        qk_norm=True,
    )
    config = NativeEngineConfig(max_context=2048, max_running=4, cache_tokens=8192)
    engine = NativeEngine(random_model(model, 0), config, version=0)
    weights = sum(parameter.nbytes for parameter in engine._model.parameters())
    cache = 2 * model.num_layers * 8 * 64 * 4 * 8192
    assert (weights, cache) == (100_683_776, 134_217_728)
    for layer in range(model.num_layers):
        for tensor in engine._kv.layer(layer):
            tensor.fill_(1.0)
    for buffer in engine.standby.values():
        buffer.fill_(0.01)
    awake = used()
    engine.sleep(keep_weights=keep_weights)
    given_back = cache + (1 if keep_weights else 2) * weights
    assert abs(awake - used() - given_back) < 0.05 * given_back


def test_what_was_written_to_standby_before_a_sleep_is_not_served_after_it():
    engine = make_engine()
    fill_standby(engine, 1)
    engine.sleep()
    with pytest.raises(SyncError, match="transfer it again"):
        engine.swap(1, "keep")
    engine.wake()
    assert engine.version == 0
    publish(engine, 1, "keep")
    turns = drive(engine, [request(0)])
    assert set(turns[0].versions) == {1}
    assert worst_replay(turns) < TOLERANCE
