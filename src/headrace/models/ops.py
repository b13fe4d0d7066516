"""The ops back end: the operations a forward pass is made of, an interface and its plain PyTorch reference.

Training and the native engine run the same model over one of these, so a fused back end is one more class
and both sides agree by construction. Shape letters: T tokens, D hidden size, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.models.logprobs import Support, head_logits, token_logprobs

if TYPE_CHECKING:
    from headrace.models.attention import AttentionContext


class Rotation(NamedTuple):
    """What happens to queries and keys before they are compared: a norm per head, if any, then the rotation."""

    cos: Tensor
    """(T, 1, head), in the queries' dtype."""
    sin: Tensor
    """Likewise; its first half is already negated."""
    q_norm: Tensor | None
    """(head,): the weight of the queries' norm. There is none, or one for queries and one for keys."""
    k_norm: Tensor | None
    eps: float
    """The norms' own."""


class Ops(Protocol):
    """Stateless apart from caches of its own: one may serve many models. Never changes its inputs."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weightᵀ + bias over the last dimension."""
        ...

    def branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `linear`, for a result that only `add_rms_norm` reads: whatever that takes for its first argument."""
        ...

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        """Several projections of one input (q, k, v; gate, up), in order.

        Plain `nn.Linear` layers may be joined into one product; any other module (an adapter's wrapper)
        must be called, or its adapter would be lost.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        ...

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (T, H, head) and k (T, Hkv, head): x·cos + (x's halves swapped)·sin.

        cos and sin are (T, 1, head) in x's dtype; sin's first half is already negated.
        """
        ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        """(T, H, head): each token attends to what the context says it sees. Writes the context's cache.

        q, k and v are as projected; norm and rotation are done here, so that a back end can fuse them.
        """
        ...

    def gated(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        """silu(gate(x)) · up(x). The layers are as for `linears`."""
        ...

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up."""
        ...

    def logits(self, hidden: Tensor, head_weight: Tensor) -> Tensor:
        """(T, V), before any temperature: what `token_logprobs` computes log-probs from."""
        ...

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
        """(log-probs (T,), entropies (T,)); the contract is `headrace.models.logprobs.token_logprobs`'s."""
        ...


class ReferenceOps:
    """Plain PyTorch on any device: the definition of what every other back end computes."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, weight, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        return [F.linear(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x) for layer in layers]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        # The norm's backward is a third cheaper than that of a mean of squares.
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = torch.rsqrt(norm * norm / x.shape[-1] + eps)
        return (x32 * scale).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        half = q.shape[-1] // 2
        return (
            torch.addcmul(q * cos, q.roll(half, -1), sin),
            torch.addcmul(k * cos, k.roll(half, -1), sin),
        )

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        cos, sin, q_norm, k_norm, eps = rotation
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)
        q, k = self.rope(q, k, cos, sin)
        return context.attend(layer, q, k, v)

    def gated(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        return self.gated_silu(*self.linears(x, (gate, up)))

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def logits(self, hidden: Tensor, head_weight: Tensor) -> Tensor:
        return head_logits(hidden, head_weight)

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
        return token_logprobs(hidden, head_weight, targets, temperature, support, chunk_rows=chunk_rows)
