"""Computing what sequences have in common once.

The sequences of a group begin with the same prompt, and often go on with the same tokens. A token's hidden state
depends on the tokens up to it alone, so equal prefixes have equal ones: the model runs over the nodes of the
sequences' prefix tree, and only attention, a small part of the work, spreads them out to whole sequences.

Shape letters: t packed tokens, u nodes of the tree (distinct prefixes), h heads, d head size, s sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from headrace.models import PackedContext

# Below this saving the gathers cost more than they spare.
MIN_SAVING = 0.1


class PrefixTree(NamedTuple):
    nodes_t: np.ndarray
    """Each packed token's node."""
    tokens_u: np.ndarray
    """For each node, the packed token that stands for it."""

    @property
    def saving(self) -> float:
        """Share of the tokens that need not be computed."""
        return 1 - len(self.tokens_u) / max(1, len(self.nodes_t))


def prefix_tree(tokens_t: np.ndarray, lengths_s: np.ndarray) -> PrefixTree:
    """Find equal prefixes: between neighbours, once the sequences are in alphabetical order."""
    ends = np.cumsum(lengths_s).tolist()
    starts = [0, *ends[:-1]]
    letters = tokens_t.astype(">i4")
    order = sorted(range(len(starts)), key=lambda i: letters[starts[i] : ends[i]].tobytes())
    nodes_t = np.empty(len(tokens_t), np.int64)
    new_tokens: list[np.ndarray] = []
    count, before = 0, (0, 0)
    for i in order:
        start, end = starts[i], ends[i]
        shared = _common_length(tokens_t[before[0] : before[1]], tokens_t[start:end])
        nodes_t[start : start + shared] = nodes_t[before[0] : before[0] + shared]
        new = end - start - shared
        nodes_t[start + shared : end] = np.arange(count, count + new)
        new_tokens.append(np.arange(start + shared, end))
        count += new
        before = (start, end)
    return PrefixTree(nodes_t, np.concatenate(new_tokens) if new_tokens else np.empty(0, np.int64))


class SharedPrefixContext:
    """Attention among the nodes of a prefix tree: each sees the nodes above it."""

    def __init__(self, sequences: PackedContext, nodes_t: Tensor, tokens_u: Tensor):
        self._sequences = sequences
        self._nodes_t = nodes_t
        self._tokens_u = tokens_u

    def attend(self, layer: int, q_uhd: Tensor, k_uhd: Tensor, v_uhd: Tensor) -> Tensor:
        spread = (x.index_select(0, self._nodes_t) for x in (q_uhd, k_uhd, v_uhd))
        return self._sequences.attend(layer, *spread).index_select(0, self._tokens_u)


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
