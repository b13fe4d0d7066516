"""Depth is found wherever it hides in a large header; memory is estimated from above."""

from __future__ import annotations

import msgspec
import pytest

from headrace.errors import CorruptMessage
from headrace.message_limits import DEEPEST, MEMORY_BYTES, check_header

PACK = msgspec.msgpack.encode


def nested(levels: int) -> bytes:
    return b"\x91" * (levels - 1) + b"\x90"


def array(*items: bytes) -> bytes:
    return b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)


def table(value: bytes) -> bytes:
    return b"\x82\xa1a" + value + b"\xa1b\xc0"


def message(value: bytes) -> bytes:
    """An extension that stands for a message with this record."""
    inside = b"\x92" + PACK("Kind") + value
    return b"\xc9" + len(inside).to_bytes(4, "big") + b"\x02" + inside


WIDE = [b"\x90"] * 600
AROUND = {
    "nothing": (lambda deep: deep, 0),
    "a small array": (lambda deep: array(b"\x01", deep), 1),
    "an array of many lists": (lambda deep: array(*WIDE, deep, *WIDE), 1),
    "arrays of many lists": (lambda deep: array(*WIDE, array(*WIDE, array(*WIDE, deep)), b"\x01"), 3),
    "more arrays than are split": (lambda deep: _around_times(deep, 12), 12),
    "an array of a hundred thousand numbers": (lambda deep: array(*[b"\x01"] * 100_000, deep), 1),
    "an array of five megabytes": (lambda deep: array(PACK("x" * (5 << 20)), *WIDE, deep), 1),
    "a table": (lambda deep: table(array(*WIDE, deep)), 2),
    "a message": (lambda deep: array(*WIDE, message(array(*WIDE, deep))), 4),
    "text that looks like lists": (lambda deep: array(PACK("Сколько? " * 3000), deep, PACK(b"\x91" * 3000)), 1),
}


def _around_times(deep: bytes, times: int) -> bytes:
    for _ in range(times):
        deep = array(*WIDE, deep)
    return deep


@pytest.mark.parametrize("around", AROUND)
def test_values_are_nested_at_most_so_deep_wherever_they_are(around):
    build, levels = AROUND[around]
    check_header(build(nested(DEEPEST - levels)), 0, 0)
    for excess in (100, 5000):
        with pytest.raises(CorruptMessage, match=f"nested at most {DEEPEST} deep"):
            check_header(build(nested(DEEPEST + excess)), 0, 0)


@pytest.mark.parametrize(
    "broken",
    [b"\xdd\xff\xff\xff\xff", b"\x91" * 400 + b"\xc1", b"\xdb\xff\xff\xff\xff", b"\x98" + b"\x90" * 500, b"\xc7"],
)
def test_a_large_header_that_is_no_messagepack_is_refused(broken):
    with pytest.raises((CorruptMessage, msgspec.DecodeError)):
        check_header(array(*WIDE, broken)[:-1], 0, 0)


def test_the_estimate_of_memory_counts_the_record_and_the_table_of_columns():
    text = PACK("x" * 1000)
    check_header(array(*[text] * 1000), 0, 0)
    many = array(*[text] * 80_000)
    with pytest.raises(CorruptMessage, match=r"at most 64 MiB more .*got '159 MiB for 0 MiB'"):
        check_header(many, 0, 0)
    check_header(array(*[text] * 60_000), 0, 60_000_000)
    check_header(b"\x90", MEMORY_BYTES // 64 - 1000, 0)
    with pytest.raises(CorruptMessage, match="at most 64 MiB more"):
        check_header(b"\x90", MEMORY_BYTES // 64 + 1000, 0)
