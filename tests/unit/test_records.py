"""The nouns and their encoding."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import records
from headrace.errors import CorruptMessage, NewerMessage, RecordError, TruncatedMessage
from headrace.records import (
    Batch,
    Episode,
    Group,
    KvEvent,
    Routes,
    Sampling,
    Support,
    Task,
    Turn,
    WeightVersion,
    decode,
    encode,
    text_before,
)


def same(a: Any, b: Any) -> bool:
    """Equal in every field, arrays by value, shape and dtype."""
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        )
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def full_turn(tokens: int, parent: int | None = None) -> Turn:
    return Turn(
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=-np.linspace(0.1, 2, tokens).astype(np.float32),
        versions=np.full(tokens, 7, np.int32),
        context=np.array([5, 6, 7], np.int32),
        stop="end",
        sampling=Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01),
        lineage=(
            KvEvent(position=0, version=6, before="kept", cause="start"),
            KvEvent(position=4, version=7, before="recomputed", base=2),
        ),
        support=Support.from_rows([np.array([t, 99]) for t in range(tokens)]),
        routes=Routes(
            experts=np.arange(tokens * 4, dtype=np.int16).reshape(tokens, 2, 2),
            gates=np.ones((tokens, 2, 2), np.float16),
        ),
        policy="solver",
        adapter="a1",
        parent=parent,
        joins=(0,) if parent is not None else (),
        engine="engine-0",
        seed=123456789012345,
    )


def full_batch() -> Batch:
    task = Task(id="t", prompt=[{"role": "user", "content": "é?"}], answer="4", data={"a": [1, 2.5, None, "x"]})
    episode = Episode(
        id="g/0",
        task=task,
        turns=(full_turn(3), full_turn(2, parent=0)),
        reward=0.5,
        failure="late",
        detail="why",
        metrics={"m": 1.0},
        started=1.0,
        finished=2.0,
    )
    group = Group(id="g", sequence=3, task=task, episodes=(episode, episode), admitted_version=6)
    return Batch(step=4, version=8, groups=(group,), advantages=np.array([1, -1], np.float32))


@pytest.mark.parametrize(
    "record",
    [full_batch(), *full_batch().groups, *full_batch().episodes, WeightVersion(number=3, parent=1, step=2)],
)
def test_a_record_comes_back_as_it_was(record):
    assert same(decode(encode(record)), record)


def test_an_event_written_before_it_named_the_base_is_read_as_of_none():
    old = msgspec.msgpack.encode([4, 7, "recomputed", "sleep"])
    event = msgspec.msgpack.decode(old, type=KvEvent)
    assert (event.position, event.version, event.before, event.cause) == (4, 7, "recomputed", "sleep")
    assert event.base is None


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    logprobs=st.floats(-1024, 0, width=32),
    supports=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=20, max_size=20),
    dtype=st.sampled_from(["<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "|u1"]),
)
def test_any_columns_come_back_bit_for_bit(tokens, logprobs, supports, dtype):
    n = len(tokens)
    turn = Turn(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(n, logprobs, np.float32),
        versions=np.zeros(n, np.int32),
        context=np.zeros(0, np.int32),
        stop="length",
        support=Support.from_rows([np.array(row, np.int64) for row in supports[:n]]),
        routes=Routes(experts=np.zeros((n, 1, 1), dtype), gates=np.ones((n, 1, 1), dtype)),
    )
    episode = Episode(id="e", task=Task(id="t", prompt="p"), turns=(turn,))
    assert same(decode(bytes(encode(episode))), episode)


def test_decoding_copies_no_column():
    data = bytes(encode(full_batch()))
    turn = next(decode(data).episodes).turns[0]
    inside = np.frombuffer(data, np.uint8)
    assert np.shares_memory(turn.tokens, inside)
    assert np.shares_memory(turn.support.ids, inside)
    assert not turn.tokens.flags.writeable
    assert turn.logprobs.ctypes.data % turn.logprobs.itemsize == 0


def test_every_truncation_is_refused():
    data = bytes(encode(full_batch()))
    for length in [*range(64), len(data) // 2, len(data) - 1]:
        with pytest.raises(TruncatedMessage):
            decode(data[:length])


def test_every_flipped_byte_of_the_body_is_refused():
    data = encode(WeightVersion(number=3, parent=1, step=2))
    for place in range(records.PRELUDE_BYTES, len(data)):
        bad = bytearray(data)
        bad[place] ^= 0x40
        with pytest.raises(CorruptMessage):
            decode(bad)


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(CorruptMessage, match="magic"):
        decode(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


def test_a_newer_message_is_refused_with_both_versions():
    data = encode(WeightVersion(number=3, parent=1, step=2))
    struct.pack_into("<H", data, 4, records.FORMAT_VERSION + 1)
    with pytest.raises(NewerMessage, match=rf"up to {records.FORMAT_VERSION} .got {records.FORMAT_VERSION + 1}"):
        decode(data)


def test_a_kind_nobody_registered_does_not_travel():
    with pytest.raises(RecordError, match="registered"):
        encode(Sampling())


def _turn(**columns) -> Turn:
    usual = {
        "tokens": np.zeros(2, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "versions": np.zeros(2, np.int32),
        "context": np.zeros(1, np.int32),
    }
    return Turn(**({"stop": "end"} | usual | columns))


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"logprobs": np.zeros(3, np.float32)}, "a turn's columns have one entry per sampled token, here (2,)"),
        (
            {"logprobs": np.zeros((2, 1), np.float32)},
            "a turn's columns have one entry per sampled token, here (2,)",
        ),
        ({"versions": np.zeros(1, np.int32)}, "a turn's columns have one entry per sampled token, here (2,)"),
        ({"support": Support.from_rows([np.zeros(1)])}, "a turn's columns have one entry per sampled token"),
        ({"support": Support(np.zeros(3, np.int32), np.array([0, 4, 3]))}, "support offsets rise from 0"),
        ({"support": Support(np.zeros(3, np.int32), np.array([], np.int64))}, "support offsets rise from 0"),
        ({"routes": Routes(np.zeros((2, 3, 1)), np.zeros((2, 3, 2)))}, "routes are two (tokens, layers, k) arrays"),
        ({"context": np.zeros((1, 1), np.int32)}, "a turn's context is one row of tokens"),
        ({"stop": "stop_string"}, "a turn that a stop string ended names it, and no other does, here stop_string"),
        ({"stop_string": "\n"}, "a turn that a stop string ended names it, and no other does, here end"),
    ],
)
def test_columns_that_do_not_fit_together_travel_and_are_named(columns, rule):
    turn = _turn(**columns)
    fault = decode(encode(Episode(id="e", task=Task(id="t", prompt=""), turns=(turn,)))).turns[0].fault()
    assert fault is not None
    assert fault[0].startswith(rule)
    assert _turn().fault() is None
    assert _turn(stop="stop_string", stop_string="\n").fault() is None


def test_a_text_is_shown_without_the_stop_string_that_ended_it():
    assert text_before("a\n\n", None) == "a\n\n"
    assert text_before("a\n\n", "\n") == "a"
    assert text_before("ab", "c") == "ab"


def test_a_batch_has_one_advantage_per_episode():
    with pytest.raises(RecordError, match="one advantage per episode, here 2"):
        msgspec.structs.replace(full_batch(), advantages=np.zeros(3, np.float32))


def test_a_turns_context_follows_its_parents_tokens():
    episode = next(full_batch().episodes)
    assert episode.full_context(0).tolist() == [5, 6, 7]
    assert episode.full_context(1).tolist() == [5, 6, 7, 0, 1, 2, 5, 6, 7]
    assert (episode.num_tokens, episode.version_min, episode.version_max) == (5, 7, 7)


def test_a_message_inside_another_keeps_its_columns():
    @records.message
    class Envelope(records.Record):
        inside: records.Nested
        extra: np.ndarray

    sent = Envelope(inside=records.Nested(full_batch()), extra=np.arange(5))
    back = decode(bytes(encode(sent)))
    assert same(back.inside.record, full_batch())
    assert back.extra.tolist() == [0, 1, 2, 3, 4]
