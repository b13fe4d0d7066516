"""XXH3-64 of pieces of tensors, all of them in one launch, and if asked for copies of them on the way.
The reference is `sync.digest`, by the xxhash library.

A piece is up to 256 KiB; the last one of a tensor counts as filled up with zeros to a multiple of 1,024 bytes. So
only XXH3's way for long inputs is here: blocks of 1,024 bytes, each of 16 stripes, each of 8 lanes of 64 bits.

    acc[lane] += low · high half of (word ^ key[stripe + lane]), and acc[lane ^ 1] += word      for every stripe
    acc = (acc ^ acc >> 47 ^ key[16 + lane]) · prime                                            after every block
    the last block's last stripe has a key of its own, and nothing follows the last block but the merging of lanes

What a block adds does not depend on the lanes before it, so a program (one warp, one piece) adds up its stripes
side by side, and only the second line goes block after block. Asynchronous on the current stream.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 256 * 1024
"""As the reference's."""
ALIGN = 16
"""Bytes that a thread reads at once: two neighbouring lanes."""
BLOCKS_AT_ONCE = 2
STAGES = 3
"""Of the loop's loads. As compiled for Hopper, 28 programs fit a multiprocessor by their registers, with 4 KiB of
each on the way: 112 KiB, where bandwidth times latency is about 40."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = _PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1

# The table's head: the secret word by word, its words at odd places, the lanes' first values.
KEYS = np.concatenate(
    [
        np.frombuffer(_SECRET, "<u8"),
        np.frombuffer(_SECRET, "<u8", 8, offset=121),
        np.frombuffer(_SECRET, "<u8", 8, offset=11),
        np.array(_START, np.uint64),
    ]
)
_BLOCK_END = tl.constexpr(16)
_LAST_STRIPE = tl.constexpr(24)
_MERGE = tl.constexpr(32)
_FIRST = tl.constexpr(40)
_HEAD = tl.constexpr(48)
_FACTOR = tl.constexpr(_PRIME32_1)
_LENGTH_FACTOR = tl.constexpr(_PRIME64_1)
_AVALANCHE = tl.constexpr(0x165667919E3779F9)


def piece_digests(tensors: Sequence[Tensor]) -> Tensor:
    """The digests (uint64) of all pieces of tensors that lie on one device, tensor after tensor."""
    return Pieces(tensors).digests()


class Pieces:
    """The pieces of tensors on one device. Buffers that are digested again and again need one table of them.

    With `targets`, tensors of as many bytes that do not overlap them, `digests` also copies each tensor there:
    what it tells is then of the very bytes that it wrote.
    """

    def __init__(self, tensors: Sequence[Tensor], targets: Sequence[Tensor] = ()):
        self._tensors = [tensor.detach() for tensor in tensors]
        self._targets = [target.detach() for target in targets]
        self._device = self._tensors[0].device
        if any(_readable(target) is not target for target in self._targets):
            raise ValueError(f"what is copied to is contiguous and lies at multiples of {ALIGN} bytes")
        in_place = all(_readable(tensor) is tensor for tensor in self._tensors)
        self._table = self._table_of(self._tensors) if in_place else None

    def digests(self) -> Tensor:
        """Of what the tensors hold now."""
        readable, table = self._tensors, self._table
        if table is None:
            readable = [_readable(tensor) for tensor in self._tensors]
            table = self._table_of(readable)
        pieces = (len(table) - KEYS.size) // 3
        found = torch.empty(pieces, dtype=torch.uint64, device=self._device)
        if pieces:
            with torch.cuda.device_of(found):
                _digest[(pieces,)](
                    table, found, COPY=bool(self._targets), BLOCKS=BLOCKS_AT_ONCE, STAGES=STAGES, num_warps=1
                )
        return found

    def _table_of(self, tensors: Sequence[Tensor]) -> Tensor:
        sizes, there = [tensor.nbytes for tensor in tensors], self._targets or tensors
        sources, targets = (plan([tensor.data_ptr() for tensor in ends], sizes) for ends in (tensors, there))
        return _table(np.concatenate([sources, targets[:, :1]], axis=1), self._device)


def _table(pieces: np.ndarray, device: torch.device) -> Tensor:
    # Filled by NumPy: a copy by torch may start OpenMP threads, and this may run in a thread of its own.
    table = torch.empty(KEYS.size + pieces.size, dtype=torch.uint64, pin_memory=device.type == "cuda")
    np.concatenate([KEYS, pieces.reshape(-1)], out=table.numpy())
    return table.to(device, non_blocking=True)


def plan(addresses: Sequence[int], sizes: Sequence[int], piece: int = PIECE) -> np.ndarray:
    """(pieces, 2), uint64: each piece's address and bytes, given those of the tensors."""
    size = np.array(sizes, np.int64)
    counts = -(-size // piece)
    start = piece * (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts))
    address = np.repeat(np.array(addresses, np.int64), counts) + start
    nbytes = np.minimum(np.repeat(size, counts) - start, piece)
    return np.stack([address, nbytes], axis=1).astype(np.uint64)


def _readable(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGN == 0 else tensor.clone()


@triton.jit
def _digest(table, found, COPY: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr):
    piece = tl.program_id(0)
    address = tl.load(table + _HEAD + 3 * piece)
    length = tl.load(table + _HEAD + 3 * piece + 1).to(tl.int32)
    # The hint makes it one load of 16 bytes; `_readable` sees to it.
    words = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    target = tl.multiple_of(tl.load(table + _HEAD + 3 * piece + 2).to(tl.pointer_type(tl.uint64)), 16)
    index = tl.arange(0, BLOCKS)[:, None, None]
    stripe = tl.arange(0, 16)[None, :, None]
    lane = tl.arange(0, 8)[None, None, :]
    place = stripe * 8 + lane
    key = tl.load(table + stripe + lane)
    # Lanes are kept as (4, 2), so that neighbours are exchanged without moving anything.
    paired = 2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :]
    lanes = tl.load(table + _FIRST + paired)
    end_key = tl.load(table + _BLOCK_END + paired)
    last = (length - 1) // 1024
    for first in tl.range(0, last, BLOCKS, num_stages=STAGES):
        block = first + index
        word = tl.load(words + (block * 128 + place), block < last, 0)
        if COPY:
            tl.store(target + (block * 128 + place), word, block < last)
        added = _added(word, key)
        for ahead in tl.static_range(BLOCKS):
            # The rows of `added` lie in registers of one thread: taking one out costs nothing.
            ended = lanes + tl.sum(tl.where(index == ahead, added, 0), axis=0)
            ended = (ended ^ (ended >> 47) ^ end_key) * _FACTOR
            lanes = tl.where(first + ahead < last, ended, lanes)
    key = tl.where(stripe == 15, tl.load(table + _LAST_STRIPE + lane), key)
    word = _ragged(words, last * 128 + place, length)
    if COPY:
        _store_ragged(target, last * 128 + place, length, word)
    lanes += tl.sum(_added(word, key), axis=0)
    even, odd = tl.split(lanes ^ tl.load(table + _MERGE + paired))
    merged = (last + 1).to(tl.uint64) * 1024 * _LENGTH_FACTOR + tl.sum((even * odd) ^ tl.umulhi(even, odd))
    merged = (merged ^ (merged >> 37)) * _AVALANCHE
    tl.store(found + piece, merged ^ (merged >> 32))


@triton.jit
def _added(word, key):
    """What blocks (B, 16, 8) add to their lanes (B, 4, 2)."""
    mixed = word ^ key
    product = (mixed & 0xFFFFFFFF) * (mixed >> 32)
    even_word, odd_word = tl.split(tl.reshape(word, (word.shape[0], 16, 4, 2)))
    even_product, odd_product = tl.split(tl.reshape(product, (word.shape[0], 16, 4, 2)))
    return tl.join(tl.sum(even_product + odd_word, axis=1), tl.sum(odd_product + even_word, axis=1))


@triton.jit
def _ragged(words, place, length):
    """Words at `place`, zeros from the byte `length` on. Bytes beyond it are not even read."""
    word = tl.load(words + place, 8 * place + 8 <= length, 0)
    octets = words.to(tl.pointer_type(tl.uint8))
    for octet in tl.static_range(7):
        at = 8 * place + octet
        part = tl.load(octets + at, (at < length) & (8 * place + 8 > length), 0)
        word |= part.to(tl.uint64) << (8 * octet)
    return word


@triton.jit
def _store_ragged(words, place, length, word):
    """The words that lie before the byte `length`, the last one as far as it does."""
    tl.store(words + place, word, 8 * place + 8 <= length)
    octets = words.to(tl.pointer_type(tl.uint8))
    for octet in tl.static_range(7):
        at = 8 * place + octet
        part = ((word >> (8 * octet)) & 0xFF).to(tl.uint8)
        tl.store(octets + at, part, (at < length) & (8 * place + 8 > length))
