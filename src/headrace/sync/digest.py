"""Checksums of tensors: the same number wherever a tensor's bytes lie. No torch here.

A tensor's bytes are cut into pieces of 256 KiB. Each piece, the last one filled up with zeros to a multiple of
1,024 bytes, has its XXH3-64 (seed 0, default secret). The tensor's digest is the XXH3-64 of its pieces' digests,
one after another as little-endian words of 8 bytes, with the tensor's length in bytes as the last word. An empty
tensor has no piece, and so the digest of the word 0. Dtype and shape do not count.

Pieces make many independent inputs of one tensor, which is what a GPU needs (`kernels.digest`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch

PIECE = 256 * 1024
BLOCK = 1024
ALIGN = 16
"""Of addresses, for the kernel."""
# From this size on, threads pay: the library releases the interpreter's lock for a piece.
_PARALLEL_BYTES = 1 << 26
_THREADS = 8
# What a thread takes at once, and what is copied from a device at once where there is no kernel for it.
_SPAN = 64 * PIECE
_NONE = np.empty(0, np.uint64)


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Each tensor's digest. They may lie on several devices, which work beside each other and beside the CPU.

    Reads what the current streams have written by then, and waits for them. On the CPU it runs no torch operation:
    in a thread of its own, as where weights are verified, that would start a second pool of OpenMP threads.
    """
    return Digester(tensors).digests()


def version_digest(checksums: Mapping[str, int]) -> int:
    """One number for all of a version's bytes, given its tensors' digests by name, wherever they lay."""
    named = [f"{name} {checksums[name]:016x}\n" for name in sorted(checksums)]
    return xxhash.xxh3_64_intdigest("".join(named).encode())


class Digester:
    """Of the same tensors again and again: what does not depend on their content is prepared."""

    def __init__(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] = ()):
        """With `targets`, which are for tensors on CUDA alone (`copies_on_the_way`), the tensors are copied there
        while they are read."""
        self._sizes = [tensor.nbytes for tensor in tensors]
        places_on: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places_on.setdefault(tensor.device, []).append(place)
        # Devices first: they work while the CPU does.
        self._parts = [
            (
                places,
                Words([self._sizes[place] for place in places]),
                _pieces_of([tensors[place] for place in places], device, targets),
            )
            for device, places in sorted(places_on.items(), key=lambda item: item[0].type == "cpu")
        ]

    def digests(self) -> list[int]:
        """As `digests`, of what the tensors hold now."""
        return self.begin()()

    def begin(self) -> Callable[[], list[int]]:
        """Devices begin now; what is returned waits for them and has the digests."""
        found = [(places, words, begin()) for places, words, begin in self._parts]

        def outcome() -> list[int]:
            digests = [0] * len(self._sizes)
            for places, words, own in found:
                for place, digest in zip(places, words.digests(own()), strict=True):
                    digests[place] = digest
            return digests

        return outcome


def copies_on_the_way(*ends: torch.Tensor) -> bool:
    """Whether tensors between these two are copied and digested in one pass."""
    if ends[0].device.type != "cuda" or ends[0].device != ends[1].device:
        return False
    return all(end.data_ptr() % ALIGN == 0 for end in ends) and has_kernels()


@cache
def has_kernels() -> bool:
    """For tensors on CUDA."""
    return importlib.util.find_spec("triton") is not None


def _pieces_of(
    tensors: Sequence[torch.Tensor], device: torch.device, targets: Sequence[torch.Tensor]
) -> Callable[[], Callable[[], np.ndarray]]:
    """Begins to digest all pieces, tensor after tensor; what it returns waits for them."""
    if device.type == "cuda" and has_kernels():
        from headrace.kernels.digest import Pieces

        prepared = Pieces(tensors, targets)

        def launch() -> Callable[[], np.ndarray]:
            found = prepared.digests()
            return lambda: found.cpu().numpy()

        return launch
    if device.type == "cpu" and all(tensor.is_contiguous() for tensor in tensors):
        raw = [_bytes_of(tensor) for tensor in tensors]
        return lambda: lambda: _pieces_of_all(raw)
    here = _on_the_cpu if device.type == "cpu" else _through_the_cpu
    return lambda: lambda: here(tensors)


class Words:
    """The words that tensors' digests are of: their pieces' digests, and behind those of each its length."""

    def __init__(self, sizes: Sequence[int]):
        nbytes = np.array(sizes, np.int64)
        ends = np.cumsum(-(-nbytes // PIECE) + 1)
        self._words = np.zeros(ends[-1] if len(ends) else 0, "<u8")
        self._words[ends - 1] = nbytes
        self._of_pieces = np.ones(len(self._words), bool)
        self._of_pieces[ends - 1] = False
        bounds = [0, *(8 * ends).tolist()]
        self._bounds = list(pairwise(bounds))

    def digests(self, pieces: np.ndarray) -> list[int]:
        """Each tensor's, given the digests of all pieces, tensor after tensor."""
        self._words[self._of_pieces] = pieces
        raw = self._words.view(np.uint8).data
        return [xxhash.xxh3_64_intdigest(raw[first:last]) for first, last in self._bounds]


def digests_of_bytes(parts: Sequence[memoryview]) -> list[int]:
    """As of tensors that have these bytes."""
    return Words([len(part) for part in parts]).digests(_pieces_of_all(parts))


def _on_the_cpu(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """The digests of all pieces."""
    return _pieces_of_all([_bytes_of(tensor) for tensor in tensors])


def _pieces_of_all(raw: Sequence[memoryview]) -> np.ndarray:
    spans = [span for one in raw for span in _spans(one)]
    if sum(map(len, spans)) < _PARALLEL_BYTES:
        found = [_pieces(span) for span in spans]
    else:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(_pieces, spans))
    return np.concatenate([_NONE, *found])


def _through_the_cpu(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """As `_on_the_cpu` for a device without a kernel. On the CPU it needs the room of one span."""
    import torch

    found = [_NONE]
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found += [_pieces(flat[start : start + _SPAN].cpu().numpy().data) for start in range(0, len(flat), _SPAN)]
    return np.concatenate(found)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of one on the CPU, without a copy where it is contiguous."""
    import torch

    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1).view(torch.uint8).numpy().data
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    known_to_numpy = tensor.view(words.get(tensor.itemsize, tensor.dtype)).numpy()
    return np.ascontiguousarray(known_to_numpy).reshape(-1).view(np.uint8).data


def _spans(raw: memoryview) -> Iterator[memoryview]:
    return (raw[start : start + _SPAN] for start in range(0, len(raw), _SPAN))


def _pieces(raw: memoryview) -> np.ndarray:
    whole = len(raw) - len(raw) % PIECE
    found = [xxhash.xxh3_64_intdigest(raw[start : start + PIECE]) for start in range(0, whole, PIECE)]
    if rest := bytes(raw[whole:]):
        found.append(xxhash.xxh3_64_intdigest(rest + bytes(-len(rest) % BLOCK)))
    return np.array(found, np.uint64)
