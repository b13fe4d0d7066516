"""Combinations in which every two values of different axes meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Cell = tuple[Any, ...]
Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairwise(*axes: Sequence[Any]) -> list[Cell]:
    """Few combinations, one value of each axis, in which each pair of values occurs. Always the same ones: the next
    is the first, in the order of the axes, that has most pairs which are still to come."""
    left = {pair for cell in product(*axes) for pair in pairs_of(cell)}
    chosen: list[Cell] = []
    while left:
        chosen.append(max(product(*axes), key=lambda cell: len(left & pairs_of(cell))))
        left -= pairs_of(chosen[-1])
    return chosen


def pairs_of(cell: Cell) -> set[Pair]:
    return set(combinations(enumerate(cell), 2))
