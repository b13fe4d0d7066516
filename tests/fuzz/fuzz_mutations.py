"""Changes to an input that know nothing of its format: flipped bits, odd numbers, pieces moved or doubled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_ODD_BYTES = (0, 1, 0x7F, 0x80, 0xC1, 0xD9, 0xFE, 0xFF, 0x0A, 0x0D, 0x20, 0x22, 0x2E, 0x3D, 0x5B, 0x7B)
_ODD_NUMBERS = (0, 1, -1, 16, 100, 2**7, 2**15, 2**16 - 1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
_LONGEST_REPEAT = 4096


def havoc(data: bytes, random: Random, dictionary: Sequence[bytes], others: Sequence[bytes], longest: int) -> bytes:
    """One to eight changes on top of each other."""
    changed = bytearray(data)
    for _ in range(1 << random.randrange(4)):
        random.choice(_CHANGES)(changed, random)
        if dictionary and random.random() < 0.2:
            _put(changed, random.choice(dictionary), random)
        if others and random.random() < 0.1:
            changed = splice(changed, random.choice(others), random)
    return bytes(changed[:longest])


def splice(first: bytes | bytearray, second: bytes, random: Random) -> bytearray:
    """The beginning of one and the end of the other."""
    return bytearray(first[: random.randint(0, len(first))]) + second[random.randint(0, len(second)) :]


def _put(data: bytearray, piece: bytes, random: Random) -> None:
    place = random.randint(0, len(data))
    data[place : place + (len(piece) if random.random() < 0.5 else 0)] = piece


def _flip_bit(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set_byte(data: bytearray, random: Random) -> None:
    if data:
        odd = random.choice(_ODD_BYTES) if random.random() < 0.5 else random.randrange(256)
        data[random.randrange(len(data))] = odd


def _set_number(data: bytearray, random: Random) -> None:
    width = random.choice((2, 4, 8))
    if len(data) >= width:
        place = random.randint(0, len(data) - width)
        number = random.choice(_ODD_NUMBERS) + random.randint(-1, 1)
        order = "little" if random.random() < 0.5 else "big"
        data[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, order)


def _add_to_byte(data: bytearray, random: Random) -> None:
    if data:
        place = random.randrange(len(data))
        data[place] = (data[place] + random.randint(-16, 16)) % 256


def _delete(data: bytearray, random: Random) -> None:
    start, end = _range(data, random)
    del data[start:end]


def _repeat(data: bytearray, random: Random) -> None:
    start, end = _range(data, random)
    times = random.choice((1, 2, 8, 64, 512))
    data[start:start] = (data[start:end] * times)[:_LONGEST_REPEAT]


def _move(data: bytearray, random: Random) -> None:
    start, end = _range(data, random)
    piece = data[start:end]
    del data[start:end]
    place = random.randint(0, len(data))
    data[place:place] = piece


def _insert(data: bytearray, random: Random) -> None:
    place = random.randint(0, len(data))
    data[place:place] = random.randbytes(1 << random.randrange(6))


def _truncate(data: bytearray, random: Random) -> None:
    del data[random.randint(0, len(data)) :]


def _range(data: bytearray, random: Random) -> tuple[int, int]:
    start = random.randint(0, len(data))
    return start, min(len(data), start + (1 << random.randrange(9)))


_CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _set_number,
    _add_to_byte,
    _delete,
    _repeat,
    _move,
    _insert,
    _truncate,
)
