"""Whole numbers from 0 on, most of them small, as few bytes.

    trits   five numbers a byte, each 0, 1 or 2; 2 means that number - 2 goes on below. Left out where most do
    low     the lowest `shift` bits of what goes on, where that is large: a plane of each bit, as it is
    bytes   what is above those bits, a byte each; 255 means that the rest, less 255, goes on in `wide`
    wide    the lowest bytes of these, then their second lowest, up to the largest one's highest

All but `low` are deflated. Deflate's Huffman codes give each symbol a whole number of bits. That costs next to
nothing for symbols of many bits, as gaps between sparse changes are, and much for numbers that are nearly always 0
or 1: five of these share a symbol. The lowest bits of large numbers are as good as random and stay as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

Numbers: TypeAlias = NDArray[np.unsignedinteger[Any]]
Bytes: TypeAlias = NDArray[np.uint8]

STREAMS = 4
_PER_BYTE = 5
# Five trits fill 243 of the rows; with all 256 there is one for whatever byte arrives.
_TRITS = (np.arange(256)[:, None] // 3 ** np.arange(_PER_BYTE) % 3).astype(np.uint8)
_TRIT_ESCAPE, _BYTE_ESCAPE = 2, 255
# At most one number in so many goes on in `wide`, as far as a sample can tell.
_WIDE_SHARE = 32
_SAMPLE = 4096
_MEMORY_LEVEL = 9


class Malformed(ValueError):
    """The streams are not what `pack` writes."""


class Packed(NamedTuple):
    trits: bool
    shift: int
    streams: Sequence[bytes | memoryview]
    """trits, low, bytes, wide"""


def fold(differences: NDArray[np.signedinteger[Any]]) -> Numbers:
    """0 for -1, 1 for 1, 2 for -2, 3 for 2 and so on; 0, which is no difference, becomes the largest."""
    folded = (differences << 1) ^ (differences >> (8 * differences.itemsize - 1))
    folded -= 1
    return folded.view(f"u{differences.itemsize}")


def unfold(numbers: Numbers) -> NDArray[np.signedinteger[Any]]:
    """The differences of `fold`."""
    numbers = numbers + numbers.dtype.type(1)
    signed = f"i{numbers.itemsize}"
    return (numbers >> 1).view(signed) ^ -(numbers & 1).view(signed)


def pack(numbers: Numbers) -> Packed:
    trits = bool(2 * np.count_nonzero(numbers < _TRIT_ESCAPE) > len(numbers))
    packed = b""
    if trits:
        digits = np.minimum(numbers, _TRIT_ESCAPE).astype(np.uint8)
        packed = _deflate(_five_in_one(digits))
        numbers = numbers[np.flatnonzero(digits == _TRIT_ESCAPE)]
        numbers -= _TRIT_ESCAPE
    shift = _shift(numbers)
    low = b"".join(np.packbits((numbers >> bit & 1).astype(np.uint8)).data for bit in range(shift))
    if shift:
        numbers = numbers >> numbers.dtype.type(shift)
    symbols = np.minimum(numbers, _BYTE_ESCAPE).astype(np.uint8)
    wide = numbers[np.flatnonzero(symbols == _BYTE_ESCAPE)] - numbers.dtype.type(_BYTE_ESCAPE)
    return Packed(trits, shift, (packed, low, _deflate(symbols), _deflate(_planes(wide))))


def unpack(packed: Packed, count: int, dtype: DTypeLike) -> Numbers:
    """The `count` numbers. Raises Malformed where lengths do not fit; other damage gives other numbers."""
    trits, low, symbols, wide = packed.streams
    numbers_type = np.dtype(dtype)
    if not packed.trits:
        _inflate(trits, 0)
        return _unpack_large(packed.shift, (low, symbols, wide), count, numbers_type)
    digits = _inflate(trits, -(-count // _PER_BYTE))
    numbers = _TRITS.take(digits, axis=0).reshape(-1)[:count].astype(numbers_type)
    escaped = np.flatnonzero(numbers == _TRIT_ESCAPE)
    numbers[escaped] += _unpack_large(packed.shift, (low, symbols, wide), len(escaped), numbers_type)
    return numbers


def _unpack_large(shift: int, streams: tuple[bytes | memoryview, ...], count: int, dtype: np.dtype[Any]) -> Numbers:
    low, symbols, wide = streams
    numbers = _inflate(symbols, count).astype(dtype)
    escaped = np.flatnonzero(numbers == _BYTE_ESCAPE)
    numbers[escaped] += _unpack_wide(wide, len(escaped), dtype)
    plane = -(-count // 8)
    if shift >= 8 * dtype.itemsize or len(low) != shift * plane:
        raise Malformed(f"{len(low)} bytes are not the lowest {shift} bits of {count} numbers")
    if shift:
        numbers <<= shift
    for bit in range(shift):
        bits = np.unpackbits(np.frombuffer(low, np.uint8, plane, bit * plane), count=count)
        numbers |= bits.astype(dtype) << bit
    return numbers


def _shift(numbers: Numbers) -> int:
    sample = np.sort(numbers[:: max(1, len(numbers) // _SAMPLE)])
    large = int(sample[-1 - len(sample) // _WIDE_SHARE]) if len(sample) else 0
    shift = 0
    while large >> shift >= _BYTE_ESCAPE:
        shift += 1
    return shift


def _planes(wide: Numbers) -> Bytes:
    needed = (int(wide.max(initial=0)).bit_length() + 7) // 8
    octets = wide.astype(wide.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, wide.itemsize)
    return np.ascontiguousarray(octets[:, :needed].T).reshape(-1)


def _unpack_wide(stream: bytes | memoryview, count: int, dtype: np.dtype[Any]) -> Numbers:
    planes = _inflate(stream, count * dtype.itemsize, at_most=True)
    octets = np.zeros((count, dtype.itemsize), np.uint8)
    if count:
        if len(planes) % count:
            raise Malformed(f"{len(planes)} bytes are no whole number for each of {count}")
        octets[:, : len(planes) // count] = planes.reshape(-1, count).T
    return octets.view(dtype.newbyteorder("<")).reshape(-1).astype(dtype, copy=False)


def _five_in_one(digits: Bytes) -> Bytes:
    padded = np.zeros((-(-len(digits) // _PER_BYTE), _PER_BYTE), np.uint8)
    padded.reshape(-1)[: len(digits)] = digits
    packed = padded[:, -1].copy()
    for place in reversed(range(_PER_BYTE - 1)):
        packed *= 3
        packed += padded[:, place]
    return packed


def _deflate(plain: Bytes) -> bytes:
    if not len(plain):
        return b""
    # Of repetitions only runs: there are no others, and looking for them takes twice the time. More memory makes
    # longer blocks, so fewer code tables.
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL, zlib.Z_RLE)
    return deflater.compress(plain.data) + deflater.flush()


def _inflate(stream: bytes | memoryview, length: int, *, at_most: bool = False) -> Bytes:
    """`length` bytes, or any number up to it with `at_most`. Does not unpack more, whatever the stream holds."""
    plain, ended = b"", True
    if stream:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # Room for one byte too many, or the mark of the stream's end would be left unread.
            plain = inflater.decompress(stream, length + 1)
        except zlib.error as fault:
            raise Malformed(f"a stream does not inflate: {fault}") from fault
        ended = inflater.eof and not inflater.unused_data
    if not ended or len(plain) > length or (len(plain) < length and not at_most):
        raise Malformed(f"a stream inflates to {len(plain)} bytes, not to {length}, or does not end there")
    return np.frombuffer(plain, np.uint8)
