"""What each token of a flat batch attends to.

Shape letters: T tokens, H query heads, G key/value heads, D head size, B sequences of a bucket, N pages,
S tokens of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.device import upload
from headrace.models.ragged import Ragged, has_kernel, ragged_attention

if TYPE_CHECKING:
    from headrace.models.ops import Rotation

# Padding a bucket may add to its real tokens. Measured on one core, 256 sequences of 10–60 tokens, 4 heads of
# 32, forward and backward: one call per sequence 55 ms, buckets of equal length 32 ms, of 10 % 27 ms,
# of 25 % 32 ms, one padded batch 49 ms.
MAX_PADDING = 0.1


class AttentionContext(Protocol):
    """Made for one forward pass, or for one sequence; holds everything about its tokens that layers share."""

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        """(T, H, D). Called once per layer and pass, in layer order; writes the cache where there is one."""
        ...


@runtime_checkable
class CacheContext(AttentionContext, Protocol):
    """A context over a cache of pages, which a back end may write itself, as part of another operation.

    Once per layer and pass, in layer order, it then calls `attend_projected` in place of `attend`, or
    `attend_cached`, at the latest when the other has no answer.
    """

    @property
    def rows(self) -> Tensor:
        """(T,) integers: where in a head's N·S rows each token's key and value belong; negative: nowhere."""
        ...

    def keys(self, layer: int) -> Tensor:
        """(G, N, S, D), contiguous: the layer's keys, rotated, to be written in place."""
        ...

    def values(self, layer: int) -> Tensor:
        """(G, N, S, D), contiguous: the layer's values, likewise."""
        ...

    def attend_cached(self, layer: int, q_thd: Tensor) -> Tensor:
        """(T, H, D), from rotated queries; the pass's keys and values are in the cache already."""
        ...

    def attend_projected(
        self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor, rotation: Rotation
    ) -> Tensor | None:
        """(T, H, D), from what the projections left; writes the cache too. None: it must be done apart."""
        ...


class Spans(NamedTuple):
    """Consecutive queries, span by span; int64 (spans,) each."""

    tokens: np.ndarray
    """Row of a span's first query."""
    counts: np.ndarray
    """Its queries."""
    positions: np.ndarray
    """Position of the first of them in its sequence; query i sees keys up to that plus i."""
    places: np.ndarray
    """Row of the sequence's first key."""


class _Bucket(NamedTuple):
    sequences: int
    length: int


class PackedContext:
    """Sequences laid end to end, each attending causally to itself alone. Differentiable; keeps nothing.

    Sequences of similar length share one padded attention call. Padding stands after the real tokens, where
    causality already hides it, so no mask is needed. Where there is a kernel for sequences of all lengths it takes
    those that are not all alike: for equal ones the other is faster.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu"):
        if not lengths or min(lengths) <= 0:
            raise ValueError(f"a packed batch needs sequences of at least one token, got {list(lengths)}")
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.num_tokens = starts[-1]
        counts, firsts = np.array(lengths, np.int64), np.array(starts[:-1], np.int64)
        self.spans = Spans(firsts, counts, np.zeros_like(counts), firsts)
        """The sequences, for a back end that attends by itself."""
        self.kept: dict[Any, Any] = {}
        """What such a back end works out from them once, for all layers."""
        self._lengths, self._starts, self._device = list(lengths), starts, device
        # The batch already is the bucket, in order.
        self._already_padded = len(set(lengths)) == 1
        self.positions: Tensor = upload(torch.cat([torch.arange(n) for n in lengths]), device)
        """Each token's place in its own sequence (T,): the positions a forward pass over this batch wants."""

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        if self._already_padded:
            return _attend_bucket(_Bucket(len(self._lengths), self._lengths[0]), q_thd, k_tgd, v_tgd)
        if has_kernel(q_thd.device, q_thd.dtype, q_thd.shape[-1]):
            return ragged_attention(q_thd, k_tgd, v_tgd, self._ragged)
        buckets, source, padded_place = self._padding
        sizes = [bucket.sequences * bucket.length for bucket in buckets]
        parts = (x.index_select(0, source).split_with_sizes(sizes) for x in (q_thd, k_tgd, v_tgd))
        outputs = [_attend_bucket(bucket, *part) for bucket, *part in zip(buckets, *parts, strict=True)]
        return torch.cat(outputs).index_select(0, padded_place)

    @cached_property
    def _ragged(self) -> Ragged:
        return Ragged.of(self._lengths, self._lengths, self._device)

    @cached_property
    def _padding(self) -> tuple[list[_Bucket], Tensor, Tensor]:
        """(buckets, the token at each place in them, padding included, each token's place)."""
        buckets: list[_Bucket] = []
        sources: list[Tensor] = []
        padded_place = torch.empty(self.num_tokens, dtype=torch.long)
        filled = 0
        for members in group_by_length(self._lengths):
            longest = self._lengths[members[0]]
            first = torch.tensor([self._starts[i] for i in members])[:, None]
            last = torch.tensor([self._starts[i + 1] - 1 for i in members])[:, None]
            source = first + torch.arange(longest)
            place = filled + torch.arange(source.numel()).view_as(source)
            real = source <= last
            padded_place[source[real]] = place[real]
            sources.append(torch.minimum(source, last).flatten())
            buckets.append(_Bucket(len(members), longest))
            filled += source.numel()
        return buckets, upload(torch.cat(sources), self._device), upload(padded_place, self._device)


def _attend_bucket(bucket: _Bucket, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.view(bucket.sequences, bucket.length, *x.shape[1:]) for x in (q, k, v))
    return causal_attention(q, k, v).flatten(0, 1)


class CachedContext:
    """One sequence given in pieces. Each piece sees all earlier keys and values, as they were computed then.

    So a sequence that was sampled while the weights changed under it, its cache kept, is replayed by passing
    each segment through its own version's weights. Not safe for use by two passes at once.
    """

    def __init__(self, num_layers: int):
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that have passed through every layer; the next piece's first position."""
        last = self._keys[-1]
        return 0 if last is None else last.shape[0]

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        keys, values = self.extend(layer, k_tgd, v_tgd)
        if len(keys) == len(q_thd):
            return causal_attention(q_thd[None], keys[None], values[None])[0]
        return masked_attention(q_thd[None], keys[None], values[None], self._sees(q_thd.shape[0], keys))[0]

    def extend(self, layer: int, k_tgd: Tensor, v_tgd: Tensor) -> tuple[Tensor, Tensor]:
        """(all keys, all values) of the layer so far, these the last. Instead of `attend`."""
        past_k, past_v = self._keys[layer], self._values[layer]
        if past_k is not None and past_v is not None:
            k_tgd, v_tgd = torch.cat((past_k, k_tgd)), torch.cat((past_v, v_tgd))
        self._keys[layer], self._values[layer] = k_tgd, v_tgd
        return k_tgd, v_tgd

    def _sees(self, new: int, keys: Tensor) -> Tensor:
        """(new, all) true where a new token sees a key; the same for all layers of a pass."""
        shape = (new, keys.shape[0])
        if self._mask is None or self._mask.shape != shape:
            self._mask = torch.ones(shape, dtype=torch.bool, device=keys.device).tril(shape[1] - new)
        return self._mask


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences, longest first, cut wherever one more would pad its group beyond MAX_PADDING."""
    groups: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        real += lengths[index]
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= (1 + MAX_PADDING) * real:
            groups[-1].append(index)
        else:
            groups.append([index])
            real = lengths[index]
    return groups


def causal_attention(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor) -> Tensor:
    q, k, v = q_bthd.transpose(1, 2), k_btgd.transpose(1, 2), v_btgd.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def masked_attention(q_bthd: Tensor, k_btgd: Tensor, v_btgd: Tensor, sees: Tensor) -> Tensor:
    q, k, v = q_bthd.transpose(1, 2), k_btgd.transpose(1, 2), v_btgd.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=grouped).transpose(1, 2)
