"""Messages from strangers: whatever the bytes are, they are refused with a RecordError, and never written."""

from __future__ import annotations

import datetime
import struct
import time
import tracemalloc
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.errors import CorruptMessage, NewerMessage, RecordError, TruncatedMessage
from headrace.ipc import Begin, FrameReader
from headrace.message_limits import DEEPEST, MEMORY_BYTES
from headrace.records import Batch, Episode, Nested, Task, WeightVersion, body_length, decode, encode

PRELUDE = struct.Struct("<4sHHQIIQ")
COLUMN = msgspec.msgpack.Ext(1, bytes(4))
PACK = msgspec.msgpack.encode


def sealed(header: bytes, columns: bytes = b"") -> bytes:
    """A message with this header, whose lengths and checksum are right."""
    padding = -(PRELUDE.size + len(header)) % 16
    body = header + bytes(padding) + columns
    return PRELUDE.pack(b"HDRC", 1, 0, len(body), zlib.crc32(body), len(header), 0) + body


def with_columns(*table: Any, columns: bytes = b"", refers_to: Any = COLUMN) -> bytes:
    return sealed(PACK(["Begin", [{"column": refers_to}], list(table)]), columns)


def holding(value: bytes) -> bytes:
    """A message whose record holds this MessagePack."""
    return sealed(b"\x93" + PACK("Begin") + b"\x91\x81\xa1a" + value + b"\x90")


def array(count: int, item: bytes) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (sealed(PACK(["Batch", [1, 2, [], COLUMN], [["<f4", [-1], 0]]])), "a column's sides are 0 or more .got -1"),
        (with_columns(["<f4", [-1], 0], columns=bytes(16)), "a column's sides are 0 or more"),
        (with_columns(["<f4", [-1, -4], 0], columns=bytes(16)), "a column's sides are 0 or more"),
        (with_columns(["<f4", [4], -16], columns=bytes(64)), "begin after those before them, at 0 .got -16"),
        (with_columns(["<f4", [4], 3], columns=bytes(32)), "begin after those before them, at 0 .got 3"),
        (
            with_columns(["<f4", [4], 0], ["<f4", [4], 0], columns=bytes(16)),
            "begin after those before them, at 16 .got 0",
        ),
        (with_columns(["<f4", [4], 2**63], columns=bytes(16)), "begin after those before them"),
        (with_columns(["<f4", [5], 0], columns=bytes(16)), "a column lies within the message"),
        (with_columns(["<f4", [2**62, 2**62], 0], columns=bytes(16)), "a column lies within the message"),
        (with_columns(["<f4", [0, 2**62, 2**62], 0]), "a column lies within the message"),
        (with_columns(["<f4", [1] * 33, 0], columns=bytes(16)), "a column has at most 32 dimensions .got 33"),
        (with_columns(["<f4", [2], 0], columns=bytes(32)), "columns end where it ends"),
        (with_columns(["(((", [4], 0], columns=bytes(16)), "a column has one of the types"),
        (with_columns([">i4", [4], 0], columns=bytes(16)), "a column has one of the types"),
        (with_columns(["|O", [2], 0], columns=bytes(16)), "a column has one of the types"),
        (with_columns(["<U500000000", [0], 0]), "a column has one of the types"),
        (with_columns(["i4,i4", [2], 0], columns=bytes(16)), "a column has one of the types"),
        (with_columns(["(2,2)i4", [1], 0], columns=bytes(16)), "a column has one of the types"),
        (with_columns(["<i4", [1.5], 0], columns=bytes(16)), "header describes its record .*Expected `int`"),
        (with_columns(refers_to=COLUMN), "header describes its record .*index out of range"),
        (with_columns(refers_to=msgspec.msgpack.Ext(1, b"x")), "an extension is the number of a column"),
        (with_columns(refers_to=msgspec.msgpack.Ext(9, bytes(4))), "an extension is the number of a column"),
        (with_columns(refers_to=msgspec.msgpack.Ext(2, PACK(["Nothing", []]))), "the message's kind is known"),
        (sealed(PACK(["x" * 1000, [], []])), "header describes its record"),
        (sealed(PACK(["Nothing", [], []])), "kind is known .got 'Nothing'.; import the module"),
        (sealed(PACK(["Batch", [1, 2, [], 3], []])), "header describes its record"),
        (sealed(PACK(["Batch", [1, 2, [], COLUMN], [["<f4", [], 0]]]), bytes(16)), "header describes its record"),
        (sealed(PACK(["Batch", [1, 2, [], COLUMN], [["<f4", [1], 0]]]), bytes(16)), "one advantage per episode"),
        (sealed(b"\x93\xa5Begin" + b"\x91" * 5000), "header describes its record .*recursion"),
        (sealed(b""), "header describes its record"),
        (sealed(PACK(["Stop", [], []])) + b"x", "the message has 48 bytes .got 49"),
        (holding(b"\x91" * 300 + b"\x90"), f"nested at most {DEEPEST} deep"),
        (holding(b"\x81\xa1a" * 300 + b"\x90"), f"nested at most {DEEPEST} deep"),
        (holding(array(300, b"\x90") + b"\x91"), "header describes its record"),
        (holding(b"\xde\x01\x2c" + b"\x91\x00\x00" * 300), "tables have text and numbers as keys"),
        (holding(array(2_000_000, b"\x90")), "at most 64 MiB more than the message's bytes"),
    ],
)  # fmt: skip
def test_a_message_that_encode_would_not_write_is_refused_with_the_rule(message, rule):
    with pytest.raises(CorruptMessage, match=rule):
        decode(message)


def test_a_type_of_three_megabytes_is_refused_at_once():
    message = with_columns(["i4," * 1_000_000, [1], 0], columns=bytes(16))
    begun = time.perf_counter()
    with pytest.raises(CorruptMessage):
        decode(message)
    assert time.perf_counter() - begun < 1.0


def test_an_envelope_in_an_envelope_is_refused_by_both_ends():
    inner = PACK(["Begin", [{"a": msgspec.msgpack.Ext(2, PACK(["Stop", []]))}]])
    with pytest.raises(CorruptMessage, match="envelope's content is no envelope"):
        decode(with_columns(refers_to=msgspec.msgpack.Ext(2, inner)))
    with pytest.raises(CorruptMessage, match="holds no other envelope"):
        decode(holding(array(300, b"\x90")[:-1] + PACK(msgspec.msgpack.Ext(2, inner))))
    envelope = Begin(options={"a": Nested(Begin(options={"b": Nested(Begin(options={}))}))})
    with pytest.raises(RecordError, match="no envelope"):
        encode(envelope)


@pytest.mark.parametrize(
    ("offset", "form", "value", "error", "rule"),
    [
        (4, "<H", 0, CorruptMessage, "message versions up to 1, from 1 .got 0"),
        (4, "<H", 2, NewerMessage, "message versions up to 1 .got 2"),
        (6, "<H", 7, CorruptMessage, "reserved fields are zero"),
        (24, "<Q", 7, CorruptMessage, "reserved fields are zero"),
        (20, "<I", 2**32 - 1, CorruptMessage, "header lies within the 16 bytes .*got 4294967295"),
        (8, "<Q", 2**63, CorruptMessage, "a message has at most 4294967296 bytes here .got 9223372036854775808"),
        (8, "<Q", 17, TruncatedMessage, "the message has 49 bytes"),
        (8, "<Q", 15, CorruptMessage, "the message has 47 bytes"),
    ],
)
def test_a_prelude_is_refused_for_each_field(offset, form, value, error, rule):
    data = bytearray(sealed(PACK(["Stop", [], []])))
    struct.pack_into(form, data, offset, value)
    with pytest.raises(error, match=rule):
        decode(data)


def test_a_reader_refuses_a_length_above_its_limit_at_the_prelude():
    message = bytes(encode(Task(id="t", prompt="x" * 1000)))
    announced = len(message) - PRELUDE.size
    assert body_length(message, limit=announced) == announced
    assert [task.id for task in FrameReader(limit=announced).feed(message)] == ["t"]
    rule = f"a message has at most {announced - 1} bytes here .got {announced}"
    with pytest.raises(CorruptMessage, match=rule):
        body_length(message, limit=announced - 1)
    with pytest.raises(CorruptMessage, match=rule):
        FrameReader(limit=announced - 1).feed(message[: PRELUDE.size])
    with pytest.raises(CorruptMessage, match=r"at most 4294967296 bytes here .got 9223372036854775808"):
        FrameReader().feed(PRELUDE.pack(b"HDRC", 1, 0, 2**63, 0, 0, 0))


def test_a_message_in_pieces_is_there_once_and_what_follows_it_is_kept():
    large = Begin(options={"column": np.arange(1 << 21, dtype=np.int64)})
    stream = bytes(encode(large)) + bytes(encode(Task(id="a", prompt=""))) + bytes(encode(Task(id="b", prompt="")))
    reader, found = FrameReader(), []
    tracemalloc.start()
    try:
        for start in range(0, len(stream), 1 << 20):
            found += reader.feed(stream[start : start + (1 << 20)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(found[0].options["column"], large.options["column"])
    assert [task.id for task in found[1:]] == ["a", "b"]
    assert peak < 1.5 * len(stream)


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\x81\x00\x00", b"\xe0", b"\xa2ab", b"\xa4" + "😀".encode()])
def test_what_is_accepted_takes_at_most_64_mib_more_than_its_bytes(item):
    for count in (20_000, 100_000, 300_000, 600_000, 1_200_000, 5_000_000):
        message = holding(array(count, item))
        tracemalloc.start()
        try:
            decode(message)
            accepted = True
        except CorruptMessage:
            accepted = False
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= MEMORY_BYTES + len(message)
        if not accepted:
            return
    pytest.fail("five million values were accepted")


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_nesting_is_accepted_by_both_ends_up_to_the_same_depth():
    """In a large message and in a small one; the record itself is two levels."""
    for beside in ([], [[]] * 500, [[[]] * 30] * 30):
        for deep in (1, 100, DEEPEST - 5):
            task = Task(id="t", prompt="", data={"deep": nested(deep), "beside": beside})
            assert decode(encode(task)).data == task.data
        for deep in (DEEPEST + 1, 600, 10_000, 200_000):
            with pytest.raises(RecordError):
                encode(Task(id="t", prompt="", data={"deep": nested(deep), "beside": beside}))


def test_a_message_with_many_turns_and_much_foreign_text_is_read():
    text = "Сколько будет семнадцать и четыре? " * 40_000
    tasks = [{"question": text, "numbers": list(range(100)), "more": [[]] * 100} for _ in range(3)]
    task = Task(id="t", prompt=text, data={"tasks": tasks})
    assert decode(encode(task)).data == task.data


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**64, "can't serialize ints"),
        (-(2**63) - 1, "can't serialize ints"),
        (cycle, "recursion"),
        ("\ud800", "surrogates not allowed"),
        ({"\ud800": 1}, "surrogates not allowed"),
        (1j, "'complex'"),
        (object(), "'object'"),
        (int, "'type'"),
        ((i for i in ()), "'generator'"),
        (np.array([object()]), "one of the types"),
        (np.zeros(2, "i4,i4"), "one of the types"),
        (np.zeros(2, ">i4"), "one of the types"),
        (np.zeros(2, "c8"), "one of the types"),
        (np.array(["a"]), "one of the types"),
        (np.zeros(2, "M8[s]"), "one of the types"),
        (np.zeros((1,) * 33), "33 dimensions"),
        (msgspec.msgpack.Ext(5, b"x"), "an extension is"),
        (msgspec.Raw(b"\xc1"), "malformed"),
        (Nested(3), "registered"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_message_cannot_carry_is_refused_when_it_is_written(value, why):
    with pytest.raises(RecordError, match=why):
        encode(Task(id="t", prompt="p", data={"value": value}))


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (float("inf"), float("inf")),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        ((1, 2), [1, 2]),
        ({3}, [3]),
        ({1: 2, None: 3, 2.5: 4}, {1: 2, None: 3, 2.5: 4}),
        ({(1, 2): 3}, {(1, 2): 3}),
        (b"abc", b"abc"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
    ],
)
def test_plain_values_of_users_arrive(value, back):
    assert decode(encode(Task(id="t", prompt="p", data={"value": value}))).data["value"] == back


@pytest.mark.parametrize(
    "column", [np.array(3), np.zeros((0, 3), np.float16), np.arange(10)[::2], np.ones((2, 2)).T]
)
def test_odd_columns_keep_their_shape_and_values(column):
    back = decode(encode(Begin(options={"column": column}))).options["column"]
    assert (back.dtype, back.shape, back.tolist()) == (column.dtype, column.shape, column.tolist())
    assert not back.flags.writeable


@pytest.mark.parametrize(
    "record",
    [
        Task(id=3, prompt="p"),  # type: ignore[arg-type]
        Task(id="t", prompt=[{1: 2}]),  # type: ignore[dict-item]
        Task(id="t", prompt="p", data=None),  # type: ignore[arg-type]
        Episode(id="e", task=Task(id="t", prompt="p"), metrics={"m": "x"}),  # type: ignore[dict-item]
        Episode(id="e", task=Task(id="t", prompt="p"), metrics={1: 2.0}),  # type: ignore[dict-item]
        WeightVersion(number=2**70, parent=None, step=0),
        Batch(step=1, version=1, groups=(), advantages=[]),  # type: ignore[arg-type]
    ],
)
def test_a_field_that_is_not_of_its_type_is_refused_when_it_is_written(record):
    with pytest.raises(RecordError, match=f"fields of {type(record).__name__} hold values of their types"):
        encode(record)


def test_an_error_quotes_little_of_a_value():
    with pytest.raises(RecordError) as caught:
        encode(Task(id="t", prompt="p", data={"value": "\ud800" * 1_000_000}))
    assert len(str(caught.value)) < 1000
    assert len(str(RecordError("rule", "x" * 10**6))) < 300
    assert len(str(RecordError("rule", ["x" * 100] * 10**4))) < 300
    assert "type int that is too large" in str(RecordError("rule", 1 << 10**5))
