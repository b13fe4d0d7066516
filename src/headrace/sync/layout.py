"""Where tensors lie in a run of bytes: the same rule for a version's image and for an engine's buffers.

Projections of one input (q, k, v; gate, up) follow each other without a gap, so that one product can compute them.
Where an engine's buffers have the image's very layout, a version arrives by plain copies of long runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from headrace.sync.base import TensorSpec

ALIGN = 256
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Kind = tuple[str, tuple[int, ...], int]
"""dtype, as in "bfloat16"; shape; bytes."""


def lay_out(tensors: Mapping[str, Kind], align: int = ALIGN) -> tuple[tuple[TensorSpec, ...], int]:
    """(every tensor's place, in order; bytes of all). Neighbours are put at the place of their first. Without
    alignment tensors of larger elements come first, so that each begins at a multiple of its element's size."""
    if align == 1:
        tensors = dict(sorted(tensors.items(), key=lambda item: -_element_bytes(item[1])))
    specs: list[TensorSpec] = []
    placed: set[str] = set()
    end = 0
    for name in tensors:
        if name in placed:
            continue
        end = -(-end // align) * align
        for member in neighbours(name, tensors):
            dtype, shape, nbytes = tensors[member]
            specs.append(TensorSpec(name=member, dtype=dtype, shape=shape, offset=end, nbytes=nbytes))
            placed.add(member)
            end += nbytes
    return tuple(specs), end


def neighbours(name: str, tensors: Mapping[str, Kind]) -> tuple[str, ...]:
    """The tensors that lie side by side with this one, itself among them."""
    parts = name.split(".")
    for group in _TOGETHER:
        place = next((i for i, part in enumerate(parts) if part in group), None)
        if place is None:
            continue
        members = tuple(".".join([*parts[:place], other, *parts[place + 1 :]]) for other in group)
        if all(m in tensors for m in members) and len(set(_columns(tensors[m] for m in members))) == 1:
            return members
    return (name,)


def _columns(kinds: Iterable[Kind]) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype, shape[1:]) for dtype, shape, _ in kinds]


def _element_bytes(kind: Kind) -> int:
    elements = math.prod(kind[1])
    return kind[2] // elements if elements else 1
