"""Messages: `decode`, and `FrameReader` with the same bytes in pieces. What is read is written and read again."""

from __future__ import annotations

import math
import struct
import zlib
from random import Random
from typing import Any

import msgspec
import numpy as np
from fuzz_mutations import havoc

from headrace import ipc, records, workers  # noqa: F401 - they register their message kinds
from headrace.errors import RecordError
from headrace.records import (
    Batch,
    Episode,
    Group,
    KvEvent,
    Nested,
    Routes,
    Sampling,
    Support,
    Task,
    Turn,
    decode,
    encode,
)

declared = (RecordError,)
longest = 1 << 15
dictionary = (
    b"HDRC", b"<i4", b"<f4", b"<i8", b"<f2", b"|u1", b"|b1", b">i4", b"|O", b"<U4", b"<m8[s]", b"(2,3)i4", b"i4,i4",
    b"\xd4\x01\x00", b"\xd6\x01\x00\x00\x00\x00", b"\xd4\x02\x00", b"\xff", b"\xcf" + 8 * b"\xff",
    b"\xdd" + 4 * b"\xff", b"\xc6" + 4 * b"\xff", b"\x91" * 200, b"\xcb\x7f\xf8" + 6 * b"\x00",
)  # fmt: skip

_PRELUDE = struct.Struct("<4sHHQIIQ")


def _turn(tokens: int) -> Turn:
    return Turn(
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        versions=np.full(tokens, 3, np.int32),
        context=np.array([5, 6, 7], np.int32),
        stop="end",
        sampling=Sampling(temperature=0.7, top_k=5),
        lineage=(KvEvent(position=0, version=3, before="kept", cause="start"),),
        support=Support.from_rows([np.array([t, 99]) for t in range(tokens)]),
        routes=Routes(
            experts=np.zeros((tokens, 2, 2), np.int16),
            gates=np.ones((tokens, 2, 2), np.float32),
        ),
        joins=(0,),
    )


def corpus() -> list[bytes]:
    task = Task(id="t", prompt=[{"role": "user", "content": "é?"}], answer="4", data={"a": [1, 2.5, None, "x"]})
    episode = Episode(id="g/0", task=task, turns=(_turn(3), _turn(0)), reward=0.5, metrics={"m": 1.0})
    group = Group(id="g", sequence=3, task=task, episodes=(episode,))
    batch = Batch(step=1, version=2, groups=(group,), advantages=np.array([1], np.float32))
    failed = ipc.Failed(call=1, error="LawBroken", args=["a", None, 1])
    begin = ipc.Begin(options={"nested": Nested(episode), "column": np.ones((2, 3), np.uint8)})
    return [bytes(encode(record)) for record in (task, episode, group, batch, failed, begin, ipc.Stop())]


def run(data: bytes) -> None:
    refused: list[RecordError] = []
    try:
        record = decode(data)
        assert np.array_equal(encode(record), encode(decode(encode(record))))
    except RecordError as error:
        refused.append(error)
    reader = ipc.FrameReader(limit=longest)
    middle = len(data) // 2
    try:
        whole = reader.feed(data[:middle]) + reader.feed(data[middle:] + data)
        # What the decoder refuses may be several messages, which it takes one at a time.
        assert refused or len(whole) == 2, "the reader does not find what the decoder reads"
    except RecordError as error:
        assert refused, "the reader refuses what the decoder reads"
        refused.append(error)
    if refused:
        raise refused[0]


def mutate(data: bytes, random: Random) -> bytes:
    """Another record, table of columns or column bytes, under a prelude that is right."""
    if len(data) < records.PRELUDE_BYTES:
        return data
    header_length = _PRELUDE.unpack_from(data)[5]
    start = records.PRELUDE_BYTES + header_length
    header, columns = data[records.PRELUDE_BYTES : start], data[start + -start % 16 :]
    try:
        kind, record, table = msgspec.msgpack.decode(header)
        what = random.random()
        if what < 0.7:
            record = _changed(record, random)
        elif what < 0.85:
            table = _changed(table, random)
        header = msgspec.msgpack.encode([kind, record, table])
    except (msgspec.DecodeError, TypeError, ValueError, OverflowError, RecursionError):
        pass
    if random.random() < 0.2:
        header = havoc(header, random, dictionary, (), longest)
    if random.random() < 0.1:
        columns = havoc(columns, random, (), (), longest)
    return _message(header, columns, random)


def generate(random: Random) -> bytes:
    """Any tree under the name of a known kind, and a table of columns that is right or nearly."""
    kind = random.choice([*records._KINDS, "Unknown"])
    fields = len(getattr(records._KINDS.get(kind), "__struct_fields__", ()))
    tree = [_tree(random, 0) for _ in range(max(0, fields + random.randint(-1, 1)))]
    table, columns = [], b""
    for _ in range(random.randint(0, 4)):
        name = random.choice(("<i4", "<f4", "<i8", "|u1", "|b1"))
        shape = [random.randint(0, 4) for _ in range(random.choice((0, 1, 1, 2, 3)))]
        table.append([name, shape, len(columns)])
        size = math.prod(shape) * int(name[-1])
        columns += random.randbytes(size + -size % 16)
    if table and random.random() < 0.3:
        table[random.randrange(len(table))] = [random.choice((">i4", "|O", "x")), _shape(random), 16]
    return _message(msgspec.msgpack.encode([kind, tree, table]), columns, random)


def _message(header: bytes, columns: bytes, random: Random) -> bytes:
    start = -(-(records.PRELUDE_BYTES + len(header)) // 16) * 16 - records.PRELUDE_BYTES
    body = header + bytes(start - len(header)) + columns
    length, reserved = len(body), 0
    if random.random() < 0.02:
        length = random.choice((0, len(body) - 1, len(body) + 1, 2**31, 2**32, 2**63, 2**64 - 1)) % 2**64
    if random.random() < 0.02:
        reserved = random.randint(0, 2**16 - 1)
    header_length = len(header) if random.random() < 0.98 else random.randint(0, 2**32 - 1)
    return _PRELUDE.pack(b"HDRC", 1, reserved, length, zlib.crc32(body), header_length, reserved) + body


_ODD: tuple[Any, ...] = (
    None, True, 0, 1, -1, 16, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), "",
    "x", "<i4", "<f4", "<V8", "(-1,)", b"", b"xyz", [], {}, [[]], "start", "kept",
)  # fmt: skip


def _changed(tree: Any, random: Random) -> Any:
    """The same with one node exchanged, doubled, left out or wrapped."""
    if isinstance(tree, list) and tree and random.random() < 0.85:
        place = random.randrange(len(tree))
        kind = random.random()
        if kind < 0.8:
            return [*tree[:place], _changed(tree[place], random), *tree[place + 1 :]]
        if kind < 0.9:
            return [*tree[:place], tree[place], *tree[place:]]
        return [*tree[:place], *tree[place + 1 :]]
    if isinstance(tree, dict) and tree and random.random() < 0.7:
        key = random.choice(list(tree))
        return tree | {key: _changed(tree[key], random)}
    if isinstance(tree, msgspec.msgpack.Ext) and random.random() < 0.7:
        code = random.choice((tree.code, tree.code, 1, 2, 3, -1, -2, 127))
        return msgspec.msgpack.Ext(code, havoc(tree.data, random, (), (), 4096))
    if random.random() < 0.05:
        for _ in range(random.choice((10, 100, 1000))):
            tree = [tree]
        return tree
    return random.choice(_ODD)


def _tree(random: Random, depth: int) -> Any:
    kind = random.random()
    if depth < 5 and kind < 0.2:
        return [_tree(random, depth + 1) for _ in range(random.randint(0, 5))]
    if depth < 5 and kind < 0.3:
        return {random.choice(("a", "", "é")): _tree(random, depth + 1) for _ in range(random.randint(0, 3))}
    if kind < 0.5:
        return msgspec.msgpack.Ext(1, struct.pack("<I", random.choice((0, 0, 1, 1, 2, 3, 2**32 - 1))))
    if kind < 0.55:
        inside = msgspec.msgpack.encode([random.choice(list(records._KINDS)), _tree(random, depth + 1)])
        return msgspec.msgpack.Ext(2, inside)
    return random.choice(_ODD)


def _shape(random: Random) -> list[int]:
    sides = (0, 1, 2, 3, 4, 8, -1, 2**31, 2**32, 2**63 - 1, -(2**63))
    return [random.choice(sides) for _ in range(random.choice((0, 1, 1, 2, 3, 40)))]
