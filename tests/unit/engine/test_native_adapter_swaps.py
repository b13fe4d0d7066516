"""Adapters that come, change under running requests, sleep and go, each on its own."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import adapter_builders
import engine_builders
import msgspec
import numpy as np
import pytest
import torch
from adapter_builders import (
    A,
    B,
    adapter_weights,
    fill_adapter,
    make_engine,
    peft_model,
    publish_adapter,
    worst_replay,
)
from engine_builders import TOLERANCE, VOCAB, all_free, drive, events, finish, plain_logprobs, publish, request

from headrace.engine.base import Interrupt
from headrace.engine.config import NativeEngineConfig
from headrace.engine.native import NativeEngine
from headrace.errors import ConfigError, HeadraceError, LawBroken, SyncError
from headrace.records import Turn

NAMES = (None, "a", "b")
START = [(0, 1, "kept", "start")]


def spec(**changes):
    return msgspec.structs.replace(A, **changes)


def begin(engine: NativeEngine, steps: int = 4, **fields) -> None:
    """Two requests with 5 tokens of context for the base and for each adapter, after so many steps."""
    for i in range(6):
        engine.add(request(i, [i, 1, 2, 3, 4], 12, adapter=NAMES[i % 3], **fields))
    for _ in range(steps):
        engine.step()


# ── Swaps under running requests ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("interrupt", ["keep", "recompute", "resume", "retry"])
def test_an_adapters_swap_interrupts_its_own_requests_and_no_other(interrupt: Interrupt):
    undisturbed = drive(make_engine(), [request(i, [i, 1, 2, 3, 4], 12, adapter=NAMES[i % 3]) for i in range(6)])
    engine = make_engine()
    begin(engine)
    report = publish_adapter(engine, "a", 2, interrupt)
    assert (report.version, report.running) == (2, 0 if interrupt == "resume" else 2)
    assert (engine.version, engine.adapters) == (0, {"a": 2, "b": 1})
    turns = finish(engine)
    for id, turn in turns.items():
        if NAMES[id % 3] != "a":
            assert turn.tokens.tolist() == undisturbed[id].tokens.tolist()
            assert events(turn) == events(undisturbed[id])
        elif interrupt == "resume":
            assert (turn.stop, turn.versions.tolist(), events(turn)) == ("cancelled", [1] * 4, START)
        elif interrupt == "retry":
            assert (turn.versions.tolist(), events(turn)) == ([2] * 12, [(0, 2, "kept", "start")])
        else:
            before = "kept" if interrupt == "keep" else "recomputed"
            # Four tokens were sampled; the fourth had not passed through the model.
            assert (turn.versions.tolist(), events(turn)) == ([1] * 4 + [2] * 8, [*START, (8, 2, before, "swap")])
            assert [event.base for event in turn.lineage] == [0, 0]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_request_has_its_own_word_on_its_adapters_swap():
    engine = make_engine()
    words: list[Interrupt | None] = [None, "keep", "recompute", "resume", "retry"]
    for i, word in enumerate(words):
        engine.add(request(i, [i, 1, 2], 9, adapter="a", interrupt=word))
    for i, word in enumerate(words):
        engine.add(request(10 + i, [i, 1, 2], 9, adapter="b", interrupt=word))
    for _ in range(3):
        engine.step()
    publish_adapter(engine, "a", 2, "recompute")
    turns = finish(engine)
    found = [(turns[i].versions.tolist(), events(turns[i])[-1][2:]) for i in range(5)]
    both = [1] * 3 + [2] * 6
    assert found == [
        (both, ("recomputed", "swap")),
        (both, ("kept", "swap")),
        (both, ("recomputed", "swap")),
        ([1] * 3, ("kept", "start")),
        ([2] * 9, ("kept", "start")),
    ]
    assert all(events(turns[10 + i]) == START and len(turns[10 + i].tokens) == 9 for i in range(5))
    assert worst_replay(turns) < TOLERANCE


def test_a_swap_that_drains_waits_for_its_adapter_and_others_go_on_entering():
    engine = make_engine(config={"max_running": 7})
    begin(engine, 3, interrupt="drain")
    fill_adapter(engine, A, peft_model(A, 2))
    assert engine.must_drain("keep", "a")
    assert engine.must_drain("keep")
    with pytest.raises(SyncError, match="must end first"):
        engine.swap_adapter("a", 2, "keep")
    # More of it wait than there are slots; what comes after them enters.
    late = {i: NAMES[1 if i < 28 else 2] for i in range(20, 30)}
    for i, name in late.items():
        engine.add(request(i, [i, 1, 2], 4, adapter=name))
    turns: dict[int, Turn] = {}
    while engine.must_drain("keep", "a"):
        turns.update(engine.step(but="a"))
    assert {id for id in turns if NAMES[id % 3] == "a" and id < 6} == {1, 4}
    assert not set(turns) & {i for i, name in late.items() if name == "a"}
    assert {28, 29} & (set(turns) | {s.request.id for s in engine._slots.sequences if s is not None})
    for _ in range(20):
        turns.update(engine.step(but="a"))
    assert {28, 29} < set(turns)
    assert engine.swap_adapter("a", 2, "drain").running == 0
    turns |= finish(engine)
    assert [set(turns[i].versions.tolist()) for i in (1, 4, 20, 27)] == [{1}, {1}, {2}, {2}]
    assert len(turns) == 16
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_drain_lets_no_twin_of_a_prompt_in():
    engine = make_engine(config={"prefill_tokens": 8})
    wanted = [request(i, np.arange(20) % VOCAB, 3, adapter="a") for i in range(4)]
    for one in wanted:
        engine.add(one)
    engine.step()
    assert engine.running == 1
    turns: dict[int, Turn] = {}
    while engine.must_drain("drain", "a"):
        turns.update(engine.step(but="a"))
    assert list(turns) == [0]
    publish_adapter(engine, "a", 2)
    turns |= finish(engine)
    assert [set(turn.versions.tolist()) for turn in turns.values()] == [{1}, {2}, {2}, {2}]


def test_a_swap_of_the_base_is_everyones_and_lineages_name_it():
    engine = make_engine()
    begin(engine)
    publish(engine, 5, "keep")
    for _ in range(3):
        engine.step()
    publish_adapter(engine, "a", 2, "keep")
    turns = finish(engine)
    for id, turn in turns.items():
        bases = [event.base for event in turn.lineage]
        if NAMES[id % 3] is None:
            assert (events(turn), bases) == ([(0, 0, "kept", "start"), (8, 5, "kept", "swap")], [None, None])
        elif NAMES[id % 3] == "b":
            assert (events(turn), bases) == ([*START, (8, 1, "kept", "swap")], [0, 5])
            assert turn.versions.tolist() == [1] * 12
        else:
            after = [(8, 1, "kept", "swap"), (11, 2, "kept", "swap")]
            assert (events(turn), bases) == ([*START, *after], [0, 5, 5])
    assert worst_replay(turns) < TOLERANCE


def test_nothing_is_shared_under_an_adapter_once_the_base_beneath_it_changed():
    engine = make_engine()
    context = np.arange(20) % VOCAB
    first = request(0, context, 8, adapter="a", hold=True)
    engine.add(first)
    for _ in range(3):
        engine.step()
    publish(engine, 5, "keep")
    finish(engine)
    before = engine.tokens_prefilled
    # The adapter's version is the same all along; a fork is as of other weights, and is not kept for others.
    engine.add(request(1, [3], 6, adapter="a", fork_of=0, fork_at=21))
    turns = finish(engine)
    assert [(e.position, e.version, e.base, e.cause) for e in turns[1].lineage] == [
        (0, 1, 0, "start"),
        (21, 1, 5, "fork"),
    ]
    engine.release(0)
    turns |= drive(engine, [request(2, context, 4, adapter="a")])
    assert engine.tokens_prefilled - before == 20
    assert [(e.version, e.base) for e in turns[2].lineage] == [(1, 5)]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


# ── Chaos ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Chaos:
    """Requests come faster than a small cache can hold them, while all else changes."""

    seed: int
    naps: int = 0
    swaps: int = 0
    forks: int = 0

    def run(self) -> dict[int, Turn]:
        dice = np.random.default_rng(self.seed)
        size = int(dice.choice([1, 3, 4, 16]))
        config = {"page_size": size, "cache_tokens": 140, "max_running": 9, "prefill_tokens": 40}
        engine = make_engine(config=config)
        contexts = [dice.integers(0, VOCAB, 12) for _ in range(10)]
        coming = [request(i, contexts[i // 6], int(dice.integers(1, 41)), adapter=NAMES[i % 3]) for i in range(60)]
        turns: dict[int, Turn] = {}
        while coming or engine.has_work or engine.asleep:
            for _ in range(min(len(coming), int(dice.integers(0, 4)))):
                engine.add(coming.pop())
            if dice.random() < 0.04 and not engine.asleep:
                engine.sleep(keep_weights=bool(dice.random() < 0.5))
                self.naps += 1
            interrupt: Interrupt = "keep" if dice.random() < 0.5 else "recompute"
            if dice.random() < 0.15:
                name = str(dice.choice(["a", "b"]))
                publish_adapter(engine, name, engine.adapters[name] + 1, interrupt)
                self.swaps += 1
            if dice.random() < 0.05:
                publish(engine, engine.version + 1, interrupt)
            if dice.random() < 0.1:
                self._fork(engine, dice)
            if engine.asleep and engine._served.base.complete and not engine._served.adapters.lost:
                engine.wake()
            turns.update(engine.step())
        assert all_free(engine)
        return turns

    def _fork(self, engine: NativeEngine, dice: np.random.Generator) -> None:
        running = [sequence for sequence in engine._sequences.values() if sequence.slot is not None]
        if running:
            sequence = running[int(dice.integers(len(running)))]
            source, at = sequence.request, int(dice.integers(1, len(sequence.context) + 1))
            number = 1000 + self.forks
            engine.add(request(number, [1], 9, fork_of=source.id, fork_at=at, adapter=source.adapter))
            self.forks += 1


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_every_turn_replays_with_the_adapter_and_base_it_names(seed):
    chaos = Chaos(seed)
    turns = chaos.run()
    assert (chaos.naps > 2, chaos.swaps > 20, chaos.forks > 5) == (True, True, True)
    assert len(turns) == 60 + chaos.forks
    causes = {event.cause for turn in turns.values() for event in turn.lineage if turn.adapter}
    assert causes >= {"start", "swap", "preempt", "sleep"}
    assert worst_replay(turns) < TOLERANCE


# ── Coming and going ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (spec(rank=9), "'a': its rank, 9, is not in 1 … engine.max_adapter_rank = 8"),
        (spec(rank=0), "its rank, 0"),
        (spec(alpha=float("nan")), "its alpha, nan, is not a number"),
        (spec(targets=()), "it has no targets"),
        (spec(targets=("q_proj", "proj")), "its target 'proj' is no projection"),
        (spec(targets=("q_proj", "input_layernorm")), "its target 'input_layernorm' is no projection"),
        (spec(targets=("model.layers.7.self_attn.q_proj",)), "is no projection of this model's layers"),
        (spec(targets=("q_proj", "lm_head")), "its target 'lm_head' is the output head or the embedding"),
        (spec(targets=("embed_tokens",)), "is the output head or the embedding"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_and_changes_nothing(asked, why):
    engine = make_engine(resident=["b"], config={"max_adapters": 1})
    engine.drop_adapter("b")
    with pytest.raises(SyncError, match=why) as caught:
        engine.adapter_standby(asked)
    assert caught.value.stage == "announce"
    publish_adapter(engine, "b", 3)
    assert engine.adapters == {"b": 3}


def test_there_is_room_for_so_many_adapters():
    engine = make_engine(resident=["a"], config={"max_adapters": 2})
    engine.adapter_standby(B)
    with pytest.raises(SyncError, match=r"all of engine.max_adapters = 2 are taken, by \['a', 'b'\]; drop one"):
        engine.adapter_standby(spec(name="c"))
    engine.adapter_standby(A)
    engine.drop_adapter("b")
    engine.adapter_standby(spec(name="c"))
    plain = engine_builders.make_engine()
    with pytest.raises(SyncError, match="= 0, so it serves none"):
        plain.adapter_standby(A)
    with pytest.raises(SyncError, match="= 0, so it serves none"):
        plain.swap_adapter("a", 1)
    assert plain.adapters == {}


def test_a_swap_needs_something_in_standby_and_another_version():
    engine = make_engine(resident=["a"])
    with pytest.raises(SyncError, match=r"nothing is in standby for adapter 'b' \(there is for \['a'\]\)"):
        engine.swap_adapter("b", 1)
    with pytest.raises(SyncError, match="version 1 is served already"):
        engine.swap_adapter("a", 1)


@pytest.mark.parametrize(
    "changed",
    [
        spec(rank=2, alpha=3.0),
        spec(rank=8),
        spec(alpha=1.0),
        spec(targets=("o_proj",)),
        spec(targets=("model.layers.1.self_attn.q_proj", "v_proj", "down_proj")),
        spec(rank=1, alpha=0.7, targets=("layers.0.mlp.up_proj",)),
    ],
)
def test_an_adapter_may_change_its_rank_its_scale_and_its_targets_at_its_swap(changed):
    engine = make_engine()
    begin(engine)
    model = peft_model(changed, 2)
    fill_adapter(engine, changed, model)
    engine.swap_adapter("a", 2, "retry")
    for id, turn in finish(engine).items():
        if turn.adapter == "a":
            expected = plain_logprobs(model, turn)[np.arange(12), turn.tokens]
            np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE)
        else:
            assert worst_replay({id: turn}) < TOLERANCE


def test_standby_buffers_have_pefts_names_and_shapes_and_are_the_same_until_the_adapter_changes():
    engine = make_engine(resident=[])
    first = engine.adapter_standby(A)
    assert {name: tuple(buffer.shape) for name, buffer in first.items()} == {
        name: tuple(tensor.shape) for name, tensor in adapter_weights(peft_model(A, 1)).items()
    }
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight" in first
    assert all(buffer.dtype == torch.float32 and not buffer.any() for buffer in first.values())
    again = engine.adapter_standby(spec(alpha=3.0))
    assert {buffer.data_ptr() for buffer in again.values()} == {buffer.data_ptr() for buffer in first.values()}
    wider = engine.adapter_standby(spec(rank=5))
    assert {buffer.shape[0] for name, buffer in wider.items() if "lora_A" in name} == {5}


def test_another_thread_may_fill_an_adapters_standby_while_sequences_are_sampled():
    engine = make_engine()
    stop, fault = threading.Event(), []

    def scribble() -> None:
        try:
            number = 0
            while not stop.is_set():
                number += 1
                for buffer in engine.adapter_standby(spec(rank=1 + number % 8)).values():
                    buffer.fill_(float("nan"))
        except BaseException as error:
            fault.append(error)

    thread = threading.Thread(target=scribble)
    thread.start()
    wanted = [request(i, [i, 1, 2], 40, adapter=NAMES[i % 3]) for i in range(12)]
    try:
        turns = drive(engine, wanted)
    finally:
        stop.set()
        thread.join()
    assert not fault
    assert worst_replay(turns) < TOLERANCE


def test_an_adapter_is_dropped_when_its_requests_are_answered():
    engine = make_engine()
    begin(engine)
    with pytest.raises(HeadraceError, match=r"when its requests are answered.*requests \[1, 4\] of 2"):
        engine.drop_adapter("a")
    with pytest.raises(HeadraceError, match="resident or announced"):
        engine.drop_adapter("c")
    turns = finish(engine)
    engine.drop_adapter("a")
    assert engine.adapters == {"b": 1}
    with pytest.raises(SyncError, match="nothing is in standby"):
        engine.swap_adapter("a", 2)
    assert worst_replay(turns) < TOLERANCE


def test_another_adapter_has_the_place_of_one_that_was_dropped_and_nothing_of_it():
    engine = make_engine(resident=["b"], config={"max_adapters": 1})
    context = np.arange(16) % VOCAB
    drive(engine, [request(0, context, 4, adapter="b", hold=True)])
    engine.drop_adapter("b")
    publish_adapter(engine, "a", 1)
    before = engine.tokens_prefilled
    turns = drive(engine, [request(1, context, 9, adapter="a")])
    assert engine.tokens_prefilled - before == 16
    # The one it was held for is not resident any more, and then another version of it is.
    engine.drop_adapter("a")
    publish_adapter(engine, "b", 2)
    engine.add(request(2, [], 9, adapter="b", fork_of=0, fork_at=18))
    turns |= finish(engine)
    assert events(turns[2]) == [(0, 2, "kept", "start")]
    assert worst_replay(turns) < TOLERANCE
    assert all_free(engine)


def test_a_swap_within_a_pass_breaks_the_law():
    engine = make_engine()
    fill_adapter(engine, A, peft_model(A, 2))
    engine.add(request(0, adapter="a"))

    def swap(*_: object) -> None:
        engine.swap_adapter("a", 2)

    engine._model.model.layers[0].register_forward_hook(swap)
    with pytest.raises(LawBroken, match="a swap began within a forward pass"):
        engine.step()


# ── Sleep ────────────────────────────────────────────────────────────────────────────────────────────────


def test_adapters_that_are_kept_sleep_in_host_memory():
    engine = make_engine()
    undisturbed = drive(make_engine(), [request(i, [i, 1, 2, 3, 4], 12, adapter=NAMES[i % 3]) for i in range(6)])
    begin(engine)
    engine.adapter_standby(A)
    engine.sleep(keep_weights=True)
    assert not engine._served.adapters._block.resident
    with pytest.raises(SyncError, match="nothing is in standby"):
        engine.swap_adapter("a", 2)
    engine.wake()
    turns = finish(engine)
    for id, turn in turns.items():
        assert turn.tokens.tolist() == undisturbed[id].tokens.tolist()
        assert events(turn)[-1][1:] == (0 if turn.adapter is None else 1, "recomputed", "sleep")
    assert worst_replay(turns) < TOLERANCE


def test_adapters_that_were_given_up_come_again_before_the_engine_wakes():
    engine = make_engine()
    begin(engine)
    engine.sleep(keep_weights=False)
    engine.add(request(9, [1, 2], 3, adapter="b"))
    publish(engine, 1, "keep")
    with pytest.raises(HeadraceError, match="engine has no adapter 'a', no adapter 'b'"):
        engine.wake()
    # Also under the version it had.
    publish_adapter(engine, "a", 1)
    with pytest.raises(HeadraceError, match="engine has no adapter 'b'"):
        engine.wake()
    publish_adapter(engine, "b", 2)
    engine.wake()
    turns = finish(engine)
    assert {name: {int(v) for t in turns.values() if t.adapter == name for v in t.versions} for name in NAMES} == {
        None: {0, 1},
        "a": {1},
        "b": {1, 2},
    }
    assert worst_replay(turns) < TOLERANCE


def test_an_adapter_is_swapped_and_another_dropped_while_the_engine_sleeps():
    engine = make_engine()
    engine.sleep(keep_weights=True)
    engine.drop_adapter("b")
    publish_adapter(engine, "a", 2)
    engine.sleep(keep_weights=True)
    engine.wake()
    smaller = msgspec.structs.replace(B, rank=3)
    model = peft_model(smaller, 5)
    fill_adapter(engine, smaller, model)
    engine.swap_adapter("b", 5)
    turns = drive(engine, [request(i, [i, 1, 2], 9, adapter=NAMES[1 + i % 2]) for i in range(4)])
    assert worst_replay({id: turn for id, turn in turns.items() if turn.adapter == "a"}) < TOLERANCE
    for turn in turns.values():
        if turn.adapter == "b":
            expected = plain_logprobs(model, turn)[np.arange(9), turn.tokens]
            np.testing.assert_allclose(turn.logprobs, expected, atol=TOLERANCE)


# ── Broken numbers, and configuration ────────────────────────────────────────────────────────────────────


def test_what_is_no_number_in_an_adapter_is_told_with_its_version():
    engine = make_engine()
    for buffer in engine.adapter_standby(A).values():
        buffer.fill_(float("nan"))
    engine.swap_adapter("a", 7)
    engine.add(request(3, adapter="a"))
    with pytest.raises(HeadraceError, match="logits are numbers") as broken:
        finish(engine)
    assert "(engine, version 0, adapters [7, 1])" in broken.value.rule
    assert "[3]" in str(broken.value.value)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"numerics": "exact"}, 'engine.max_adapters above 0 needs engine.numerics = "fast"'),
        ({"weight_dtype": "fp8"}, 'engine.max_adapters above 0 needs engine.weight_dtype = "same"'),
    ],
)
def test_adapters_are_refused_with_what_they_do_not_go_with(settings, rule):
    NativeEngineConfig(**settings).check()
    NativeEngineConfig(max_adapters=3).check()
    with pytest.raises(ConfigError) as caught:
        NativeEngineConfig(max_adapters=1, **settings).check()
    assert (caught.value.rule, caught.value.value) == (rule, *settings.values())


def test_without_max_adapters_the_model_computes_as_ever():
    plain = engine_builders.make_engine()
    assert type(plain._model.ops).__name__ == "ReferenceOps"
    assert type(adapter_builders.make_engine()._model.ops).__name__ == "AdaptedOps"
