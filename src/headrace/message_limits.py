"""How much memory and nesting a message's header may ask of its reader, found out before anything is built.

A header is MessagePack. One byte of it can become an object of 200 bytes, and a thousand nested arrays end in the
interpreter's recursion limit. Neither can happen where few bytes may begin an array or a map, which is quickly
counted. Other headers are taken apart, and the parts that are still doubtful are walked value by value.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.errors import CorruptMessage

DEEPEST = 256
"""Nested lists, tables and records. Whoever walks what was read may recurse."""
MEMORY_BYTES = 64 << 20
"""Objects may take that much more memory than the message has bytes."""

_EXT_NESTED = 2
# Every array and map begins with one of these bytes, and so does every extension of more than 16 bytes. In the 16
# bytes of a smaller one there is no room for more than 16 levels.
_OPENING = (*range(0x80, 0xA0), *range(0xDC, 0xE0), *range(0xC7, 0xCA))
_NOT_OPENING = bytes(set(range(256)).difference(_OPENING))
_SPLIT_LEVELS, _SPLIT_ITEMS, _SPLIT_BYTES = 8, 1 << 16, 4 << 20
"""Larger arrays are not split into their items, each level of which is a copy, but walked."""
_COUNTED_BYTES = 32 << 10
_HARMLESS_CONTAINERS = DEEPEST - 16 - _SPLIT_LEVELS

_CONTAINER_BYTES, _ITEM_BYTES, _ENTRY_BYTES, _SCALAR_BYTES, _TEXT_BYTES, _EXT_BYTES = 200, 16, 60, 40, 76, 400
"""Memory of an array or map, of its room for each item or (twice) entry, of what it holds; text adds its own."""
_OPENING_BYTES, _OTHER_BYTES = 300, 64
"""The same for each byte that may open a container and for each other one, where tokens are not told apart."""
_TABLE_FACTOR = 64
"""Memory of a column's entry in the table, and of the array made of it, for each byte of the entry."""


def _token(opcode: int) -> tuple[int, int]:
    """Size and memory of a token whose opcode tells both; (0, 0) of all others."""
    if opcode <= 0x7F or opcode >= 0xE0 or opcode in (0xC0, 0xC2, 0xC3):
        return 1, _SCALAR_BYTES
    if 0xA0 <= opcode <= 0xBF:
        length = opcode - 0xA0
        return 1 + length, _TEXT_BYTES + 4 * length
    sizes = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    return (sizes[opcode], _SCALAR_BYTES) if opcode in sizes else (0, 0)


_TOKEN_SIZES, _TOKEN_MEMORY = zip(*map(_token, range(256)), strict=True)
_TEXT_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT_LENGTH_BYTES = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_EXT_SIZES = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def check_header(record: bytes, table_bytes: int, message_bytes: int) -> None:
    """Raise CorruptMessage where a record, with a table of columns beside it, takes much more memory than its
    message, or is nested too deep."""
    containers = len(record.translate(None, _NOT_OPENING))
    memory = _TABLE_FACTOR * table_bytes + _OPENING_BYTES * containers + _OTHER_BYTES * len(record)
    if memory > MEMORY_BYTES + message_bytes:
        memory = _TABLE_FACTOR * table_bytes + len(record) + _walk(record, 0, nested=False)
        if memory > MEMORY_BYTES + message_bytes:
            raise CorruptMessage(
                f"a message's record takes at most {MEMORY_BYTES >> 20} MiB more than the message's bytes",
                f"{memory >> 20} MiB for {message_bytes >> 20} MiB",
                "send it in several messages",
            )
    elif containers > _HARMLESS_CONTAINERS:
        _check_depth(record, 0)


def _check_depth(value: bytes, depth: int) -> None:
    """Walk those items of arrays that hold so many containers that they could be nested too deep."""
    # What is large holds many: counting them is left out.
    if len(value) <= _COUNTED_BYTES and len(value.translate(None, _NOT_OPENING)) <= _HARMLESS_CONTAINERS:
        return
    for item in _items(value) if depth < _SPLIT_LEVELS else [value]:
        if item is value:
            _walk(value, depth, nested=False)
        elif len(item) > _HARMLESS_CONTAINERS:
            _check_depth(bytes(item), depth + 1)


def _items(value: bytes) -> Sequence[bytes | msgspec.Raw]:
    """The items of an array, or only the value itself where it is none or should not be split."""
    if value[0] not in _ARRAYS or len(value) > _SPLIT_BYTES or _opened(value, 0, value[0])[0] > _SPLIT_ITEMS:
        return [value]
    try:
        return _ITEMS.decode(value)
    except RecursionError:
        return [value]


_ARRAYS = (*range(0x90, 0xA0), 0xDC, 0xDD)
_ITEMS = msgspec.msgpack.Decoder(list[msgspec.Raw])


def _walk(header: bytes, depth: int, *, nested: bool) -> int:
    """The most memory that the one value in `header` can take. `depth` levels are around it already."""
    memory, place, end = 0, 0, len(header)
    left, is_map = 1, False
    outer: list[tuple[int, bool]] = []
    try:
        while True:
            while not left:
                if not outer:
                    if place != end:
                        raise CorruptMessage("a value ends where its bytes end", f"{end - place} bytes beyond")
                    return memory
                left, is_map = outer.pop()
            opcode = header[place]
            size = _TOKEN_SIZES[opcode]
            left -= 1
            if size:
                place += size
                memory += _TOKEN_MEMORY[opcode]
                continue
            if opcode in _TEXT_LENGTH_BYTES:
                begin = place + 1 + _TEXT_LENGTH_BYTES[opcode]
                length = int.from_bytes(header[place + 1 : begin], "big")
                place = begin + length
                plain = opcode < 0xD9 or header[begin:place].isascii()
                memory += _TEXT_BYTES + (length if plain else 4 * length)
            elif opcode in _EXT_LENGTH_BYTES or opcode in _EXT_SIZES:
                begin = place + 1 + _EXT_LENGTH_BYTES.get(opcode, 0)
                length = _EXT_SIZES.get(opcode) or int.from_bytes(header[place + 1 : begin], "big")
                place = begin + 1 + length
                memory += _EXT_BYTES + length
                if header[begin] == _EXT_NESTED:
                    if nested:
                        raise CorruptMessage("an envelope's content holds no other envelope", f"at {begin}")
                    memory += _walk(header[begin + 1 : place], depth + len(outer) + 1, nested=True)
            else:
                if is_map and left % 2:
                    # Tables find their keys by hashes, and those of lists can be made to collide.
                    raise CorruptMessage("a large message's tables have text and numbers as keys", f"{opcode:#x}")
                outer.append((left, is_map))
                _refuse_deeper(depth + len(outer))
                left, is_map, place = _opened(header, place, opcode)
                memory += _CONTAINER_BYTES + left * (_ENTRY_BYTES if is_map else _ITEM_BYTES)
    except IndexError:
        raise CorruptMessage("a header is whole MessagePack", f"it ends within a value, at {end}") from None


def _refuse_deeper(depth: int) -> None:
    if depth > DEEPEST:
        raise CorruptMessage(
            f"lists, tables and records are nested at most {DEEPEST} deep", depth, "flatten what is sent"
        )


def _opened(header: bytes, place: int, opcode: int) -> tuple[int, bool, int]:
    """How many values an array or map holds, whether it is a map, and where the first of them is."""
    if 0x80 <= opcode <= 0x8F:
        return 2 * (opcode - 0x80), True, place + 1
    if 0x90 <= opcode <= 0x9F:
        return opcode - 0x90, False, place + 1
    if opcode not in (0xDC, 0xDD, 0xDE, 0xDF):
        raise CorruptMessage("a header is whole MessagePack", f"byte {opcode:#x} at {place}")
    begin = place + (3 if opcode in (0xDC, 0xDE) else 5)
    count = int.from_bytes(header[place + 1 : begin], "big")
    is_map = opcode >= 0xDE
    return (2 * count if is_map else count), is_map, begin
