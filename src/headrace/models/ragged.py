"""Causal attention of sequences of any lengths in one call.

    queries  ├── 1 ──┼─ 2 ─┤               a sequence's queries are its last ones:
    keys     ├────── 1 ──────┼─ 2 ─┤       the last of them sees all its keys, each one before it one less

Shape letters: T queries, U rows that keys are of, K keys, H query heads, G key/value heads, D head size,
S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.device import upload


class Ragged(NamedTuple):
    """How many queries and keys each sequence has, laid end to end."""

    queries: Sequence[int]
    keys: Sequence[int]
    """At least as many as queries."""
    query_starts: Tensor
    """int32 (S + 1,): where each one's begin, and the end."""
    key_starts: Tensor
    rows: Tensor | None = None
    """int64 (K,): the rows of what is given that are the keys, and the values. None: all, in order."""
    occurrences: tuple[Tensor, Tensor] | None = None
    """Of each row among the keys, as `kernels.rows` has them. On CUDA alone."""

    @classmethod
    def of(
        cls,
        queries: Sequence[int],
        keys: Sequence[int],
        device: torch.device | str,
        rows: Tensor | None = None,
    ) -> Ragged:
        if not queries or min(queries) <= 0:
            raise ValueError(f"a packed batch needs sequences of at least one token, got {list(queries)}")
        query_starts, key_starts = (
            upload(torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32), device) for counts in (queries, keys)
        )
        if rows is None:
            return cls(queries, keys, query_starts, key_starts)
        found = None
        if torch.device(device).type == "cuda":
            from headrace.kernels.rows import occurrences

            starts, places = (upload(torch.from_numpy(one), device) for one in occurrences(rows.numpy()))
            found = starts, places
        return cls(queries, keys, query_starts, key_starts, upload(rows, device), found)

    def keys_of(self, given: Tensor) -> Tensor:
        return given if self.rows is None else given.index_select(0, self.rows)


def has_kernel(device: torch.device | str, dtype: torch.dtype, head_size: int) -> bool:
    """Whether it is one call indeed: FlashAttention's, of cards since Ampere."""
    device = torch.device(device)
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return head_size % 8 == 0 and head_size <= 256 and torch.cuda.get_device_capability(device)[0] >= 8


def ragged_attention(q_thd: Tensor, k_ugd: Tensor, v_ugd: Tensor, ragged: Ragged) -> Tensor:
    """(T, H, D). Differentiable."""
    if has_kernel(q_thd.device, q_thd.dtype, q_thd.shape[-1]):
        found: Tensor = _Flash.apply(q_thd, k_ugd, v_ugd, ragged)
        return found
    k_kgd, v_kgd = ragged.keys_of(k_ugd), ragged.keys_of(v_ugd)
    parts = zip(q_thd.split(ragged.queries), k_kgd.split(ragged.keys), v_kgd.split(ragged.keys), strict=True)
    return torch.cat([_attend(*part) for part in parts])


def _attend(q_thd: Tensor, k_kgd: Tensor, v_kgd: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_thd, k_kgd, v_kgd))
    queries, keys = q.shape[2], k.shape[2]
    sees = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


class _Flash(torch.autograd.Function):
    """By FlashAttention's kernels, which PyTorch has. Keys are taken again for the backward pass, not kept, and
    there each of their heads for every query head of it: PyTorch would do that too, and add up more slowly."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> Tensor:
        how = ragged.query_starts, ragged.key_starts, max(ragged.queries), max(ragged.keys), 0.0, True
        keys, values = _taken(k, v, ragged)
        out, sums, random, unused, _ = torch.ops.aten._flash_attention_forward(q, keys, values, *how, False)
        ctx.save_for_backward(q, k, v, out, sums, random, unused)
        ctx.ragged, ctx.how = ragged, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from headrace.kernels.rows import sum_rows

        q, k, v, out, sums, random, unused = ctx.saved_tensors
        assert (ctx.ragged.rows is None) == (ctx.ragged.occurrences is None)
        repeats = q.shape[1] // k.shape[1]
        keys, values = _taken(k, v, ctx.ragged, repeats)
        grad_q, *of_both = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, keys, values, out, sums, *ctx.how, random, unused
        )
        if ctx.ragged.rows is None and repeats == 1:
            return grad_q, *of_both, None
        of_keys, of_values = (one.contiguous() for one in of_both)
        return grad_q, *sum_rows((of_keys, of_values), ctx.ragged.occurrences, len(k), repeats), None


def _taken(k: Tensor, v: Tensor, ragged: Ragged, repeats: int = 1) -> tuple[Tensor, Tensor]:
    """The keys and the values, each head so often."""
    from headrace.kernels.rows import take_rows

    return (k, v) if ragged.rows is None and repeats == 1 else take_rows((k, v), ragged.rows, repeats)
