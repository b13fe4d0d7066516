"""Computing what sequences have in common once.

The sequences of a group begin with the same prompt, and often go on with the same tokens. A token's hidden state
depends on the tokens up to it alone, so equal prefixes have equal ones: the model runs over the nodes of the
sequences' prefix tree. Attention has three ways. It spreads nodes out to whole sequences, in few large calls; or
each sequence asks with its own nodes alone, and sees those that it shares too, which computes less. That is one
call where there is a kernel for sequences of any lengths, and otherwise many.

Shape letters: t packed tokens, u nodes of the tree (distinct prefixes), h heads, d head size, s sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.models import (
    PackedContext,
    Ragged,
    causal_attention,
    group_by_length,
    has_kernel,
    masked_attention,
    ragged_attention,
    upload,
)

# Below this saving the gathers cost more than they spare.
MIN_SAVING = 0.1
# Pairs of query and key that a call must spare on average. On two cores, forward and backward, the second way takes
# 71–84 % of the first's time with 26,000 spared, 59–71 % with 180,000; with fewer it was not measured.
PAIRS_PER_CALL = 20_000


class Branch(NamedTuple):
    """What a sequence adds to the tree."""

    path: np.ndarray
    """Its nodes."""
    shared: int
    """How many of them, from the first on, belong to sequences before it."""


class PrefixTree(NamedTuple):
    nodes_t: np.ndarray
    """Each packed token's node."""
    tokens_u: np.ndarray
    """For each node, the packed token that stands for it."""
    branches: list[Branch]
    """In the order of their nodes."""

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
    branches: list[Branch] = []
    count, before = 0, (0, 0)
    for i in order:
        start, end = starts[i], ends[i]
        shared = _common_length(tokens_t[before[0] : before[1]], tokens_t[start:end])
        nodes_t[start : start + shared] = nodes_t[before[0] : before[0] + shared]
        new = end - start - shared
        nodes_t[start + shared : end] = np.arange(count, count + new)
        new_tokens.append(np.arange(start + shared, end))
        if new:
            branches.append(Branch(nodes_t[start:end], shared))
        count += new
        before = (start, end)
    tokens_u = np.concatenate(new_tokens) if new_tokens else np.empty(0, np.int64)
    return PrefixTree(nodes_t, tokens_u, branches)


def tree_context(
    tree: PrefixTree, lengths: Sequence[int], device: torch.device, dtype: torch.dtype, head_size: int
) -> SpreadContext | BranchContext | RaggedContext:
    """The fastest way, by what each computes. `lengths` are the packed sequences'; a pass is in `dtype`."""
    if has_kernel(device, dtype, head_size):
        return RaggedContext(tree, device)
    calls = _calls(tree)
    whole = sum(len(branch.path) ** 2 for branch in tree.branches) // 2
    apart = sum(len(call) * _queries(call) * (call[0].shared + _queries(call)) for call in calls)
    # Attention with a mask and grouped heads has no fused kernel on GPUs.
    if device.type == "cpu" and whole - apart > PAIRS_PER_CALL * len(calls):
        return BranchContext(calls, len(tree.tokens_u), device)
    return SpreadContext(PackedContext(lengths, device), tree, device)


class SpreadContext:
    """Attention among the nodes of a prefix tree by that of whole sequences."""

    def __init__(self, sequences: PackedContext, tree: PrefixTree, device: torch.device):
        self._sequences = sequences
        self._nodes_t = upload(torch.from_numpy(tree.nodes_t), device)
        self._tokens_u = upload(torch.from_numpy(tree.tokens_u), device)

    def attend(self, layer: int, q_uhd: Tensor, k_uhd: Tensor, v_uhd: Tensor) -> Tensor:
        spread = (x.index_select(0, self._nodes_t) for x in (q_uhd, k_uhd, v_uhd))
        return self._sequences.attend(layer, *spread).index_select(0, self._tokens_u)


class BranchContext:
    """Attention among the nodes of a prefix tree by sequences' own nodes, of as many sequences at once as share so
    many and have about so many more. Padding stands after the real nodes, where causality hides it."""

    def __init__(self, calls: list[list[Branch]], nodes: int, device: torch.device):
        self._calls: list[_Call] = []
        place_u = np.empty(nodes, np.int64)
        filled = 0
        for branches in calls:
            shared, queries = branches[0].shared, _queries(branches)
            paths = np.stack([_padded(branch.path, shared + queries) for branch in branches])
            rows = filled + np.arange(len(branches) * queries).reshape(len(branches), queries)
            for row, branch in zip(rows, branches, strict=True):
                own = branch.path[shared:]
                place_u[own] = row[: len(own)]
            sees = torch.ones(queries, shared + queries, dtype=torch.bool, device=device).tril(shared)
            self._calls.append(_Call(upload(torch.from_numpy(paths), device), shared, sees if shared else None))
            filled += rows.size
        self._place_u = upload(torch.from_numpy(place_u), device)

    def attend(self, layer: int, q_uhd: Tensor, k_ugd: Tensor, v_ugd: Tensor) -> Tensor:
        outputs = [call.attend(q_uhd, k_ugd, v_ugd) for call in self._calls]
        return torch.cat(outputs).index_select(0, self._place_u)


class RaggedContext:
    """Attention among the nodes of a prefix tree by sequences' own nodes, of all sequences at once."""

    def __init__(self, tree: PrefixTree, device: torch.device):
        paths = [branch.path for branch in tree.branches]
        own = [len(branch.path) - branch.shared for branch in tree.branches]
        rows = torch.from_numpy(np.concatenate(paths))
        self._ragged = Ragged.of(own, [len(path) for path in paths], device, rows)

    def attend(self, layer: int, q_uhd: Tensor, k_ugd: Tensor, v_ugd: Tensor) -> Tensor:
        return ragged_attention(q_uhd, k_ugd, v_ugd, self._ragged)


class _Call(NamedTuple):
    paths_bk: Tensor
    shared: int
    sees: Tensor | None
    """None: causal."""

    def attend(self, q_uhd: Tensor, k_ugd: Tensor, v_ugd: Tensor) -> Tensor:
        q, k, v = _rows(q_uhd, self.paths_bk[:, self.shared :]), *(_rows(x, self.paths_bk) for x in (k_ugd, v_ugd))
        out = causal_attention(q, k, v) if self.sees is None else masked_attention(q, k, v, self.sees)
        return out.flatten(0, 1)


def _rows(x_uhd: Tensor, at_bk: Tensor) -> Tensor:
    return x_uhd.index_select(0, at_bk.flatten()).view(*at_bk.shape, *x_uhd.shape[1:])


def _calls(tree: PrefixTree) -> list[list[Branch]]:
    """Branches that one call of attention takes."""
    alike: dict[int, list[Branch]] = defaultdict(list)
    for branch in tree.branches:
        alike[branch.shared].append(branch)
    calls = []
    for branches in alike.values():
        for members in group_by_length([len(branch.path) - branch.shared for branch in branches]):
            calls.append([branches[i] for i in members])
    return calls


def _queries(branches: list[Branch]) -> int:
    """Of each in one call: the first has the most."""
    return len(branches[0].path) - branches[0].shared


def _padded(path: np.ndarray, length: int) -> np.ndarray:
    return np.pad(path, (0, length - len(path)), mode="edge")


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
