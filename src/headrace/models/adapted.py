"""The ops back end under LoRA adapters: each token with its own, or none, all of them in one pass.

    x ─┬─▶ W ──────────────────────────────────────────────────────────────────────────── + ─▶ y
       └─▶ A of all adapters ─▶ only a token's own columns ─▶ B of all ─▶ times its scale ─┘

The adapters of a projection lie side by side, so a product serves all of them, and no token is moved. Projections
of one input share the first product. Shape letters: T tokens, K projections of one input, N adapters, R columns of
an adapter (its rank and zeros), I in features, O out features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.models.attention import AttentionContext
from headrace.models.logprobs import Support
from headrace.models.ops import Ops, Rotation


class Stack(NamedTuple):
    """The adapters of projections that share an input."""

    down: Tensor
    """(K·N·R, I): every projection's A, adapter by adapter."""
    up: tuple[Tensor, ...]
    """K of (O, N·R): each projection's B."""


StackOf = Callable[[tuple[Tensor, ...]], Stack | None]
"""The adapters of the projections with these weights, in order; None where there are none."""


class AdaptedOps:
    """Another back end's operations, its projections with adapters. Serves one engine: `serve` before each pass.

    A token that uses no adapter has zeros added to what `inner` gives. Adapters are numbered from 1. Rounds where
    PEFT's layer rounds. With `fused`, the scale is applied to the few columns between A and B, and B's product is
    added before it is rounded: so the way back is one product. Inference only.
    """

    def __init__(self, inner: Ops, stack_of: StackOf, scales: Tensor, *, fused: bool = False):
        """`scales` is (N + 1,) float32, by an adapter's number; read in each pass."""
        self.inner = inner
        self._stack_of, self._scales, self._fused = stack_of, scales, fused
        self._numbers: Tensor | None = None
        self._own_tn = self._scale_t = torch.empty(0)

    def serve(self, numbers_t: Tensor | None) -> None:
        """int32 (T,): the adapter of each token of the next pass, 0 for none. None: no token has one."""
        self._numbers = numbers_t
        if numbers_t is not None and not self._fused:
            all_n = torch.arange(1, len(self._scales), device=numbers_t.device)
            self._own_tn = numbers_t[:, None] == all_n
            self._scale_t = self._scales[numbers_t.long()]

    # ── Projections ──────────────────────────────────────────────────────────────────────────────────────

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._adapted(x, (weight,), [self.inner.linear(x, weight, bias)])[0]

    def branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # In parts, the sum could not be added to.
        return self.inner.branch(x, weight, bias) if self._numbers is None else self.linear(x, weight, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        weights = tuple(layer.weight for layer in layers if type(layer) is nn.Linear)
        return self._adapted(x, weights, self.inner.linears(x, layers))

    def gated(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        if self._numbers is None:
            return self.inner.gated(x, gate, up)
        return self.inner.gated_silu(*self.linears(x, (gate, up)))

    def _adapted(self, x_ti: Tensor, weights: tuple[Tensor, ...], plain: list[Tensor]) -> list[Tensor]:
        stack = None if self._numbers is None else self._stack_of(weights)
        if stack is None:
            return plain
        columns, rank = F.linear(x_ti, stack.down), stack.up[0].shape[1] // (len(self._scales) - 1)
        if self._fused:
            return self._add_scaled_columns(columns, rank, stack.up, plain)
        by_adapter = columns.unflatten(1, (len(stack.up), -1, rank))
        own = torch.where(self._own_tn[:, None, :, None], by_adapter, 0.0).flatten(2).unbind(1)
        return [out + self._scaled(F.linear(x, up)) for out, x, up in zip(plain, own, stack.up, strict=True)]

    def _scaled(self, x: Tensor) -> Tensor:
        # In float32, as a number that a tensor is multiplied by is not rounded to its type.
        return (x.float() * self._scale_t[:, None]).to(x.dtype)

    def _add_scaled_columns(
        self, columns: Tensor, rank: int, ups: tuple[Tensor, ...], plain: list[Tensor]
    ) -> list[Tensor]:
        from headrace.kernels.adapters import keep_own

        assert self._numbers is not None
        own = keep_own(columns, self._numbers, self._scales, rank).chunk(len(ups), -1)
        return [torch.addmm(out, x, up.t(), out=out) for out, x, up in zip(plain, own, ups, strict=True)]

    # ── As they are ──────────────────────────────────────────────────────────────────────────────────────

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.inner.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.inner.add_rms_norm(x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.rope(q, k, cos, sin)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        return self.inner.attention(q, k, v, rotation, layer, context)

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.inner.gated_silu(gate, up)

    def logits(self, hidden: Tensor, head_weight: Tensor) -> Tensor:
        return self.inner.logits(hidden, head_weight)

    def token_logprobs(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        temperature: Tensor | float = 1.0,
        support: Support | tuple[Tensor, Tensor] | None = None,
        *,
        chunk_rows: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.inner.token_logprobs(hidden, head_weight, targets, temperature, support, chunk_rows=chunk_rows)
