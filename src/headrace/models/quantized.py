"""FP8 (E4M3): rows with a scale each, and the ops back end that computes with them by definition.

    weight ─▶ quantize_rows ─▶ float8 (N, K), scales (N, 1) ─┐
    x      ─▶ quantize_rows ─▶ float8 (M, K), scales (M, 1) ─┴─▶ product ─▶ x's dtype ─▶ + bias
    k, v   ─▶ to_float8, without a scale ─▶ what a float8 cache gives back

The layers' projections are quantised; the embedding, the head and the norms are not. Shape letters: M tokens,
N out features, K in features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headrace.models.attention import AttentionContext
from headrace.models.joined import side_by_side
from headrace.models.ops import ReferenceOps, Rotation

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
"""448: what the largest element of a row becomes."""
LEAST = 2.0**-100
"""Largest magnitude that a row counts as having at least: a row of zeros has a scale that can be divided by."""


class QuantizedRows(NamedTuple):
    values: Tensor
    """(N, K) float8."""
    scales: Tensor
    """(N, 1) float32: what a row's values are multiplied by."""


RowsOf = Callable[[tuple[Tensor, ...]], QuantizedRows | None]
"""The quantised rows of weights that make one product, in order; None for those that stay as they are."""


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Each row over its largest magnitude, rounded to float8. Infinity and NaN become NaN."""
    x32 = x.float()
    largest = x32.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    # A quotient with a plain number would be rounded twice: torch multiplies by a reciprocal.
    whole = torch.full_like(largest, LARGEST)
    return QuantizedRows((x32 * (whole / largest)).to(FLOAT8), largest / whole)


def dequantize_rows(rows: QuantizedRows) -> Tensor:
    """float32."""
    return rows.values.float() * rows.scales


def to_float8(x: Tensor) -> Tensor:
    """Rounded to float8; what is beyond its range becomes its largest value, infinity too. NaN stays."""
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8)


def product(x: QuantizedRows, weight: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """x @ weightᵀ in float32, rounded once."""
    return (dequantize_rows(x) @ dequantize_rows(weight).T).to(dtype)


def quantize_together(weights: tuple[Tensor, ...]) -> QuantizedRows:
    """A `RowsOf` that quantises the weights it is given."""
    return quantize_rows(torch.cat([weight.detach() for weight in weights]))


class Fp8Ops(ReferenceOps):
    """Plain PyTorch on any device: what an engine with FP8 computes, by definition.

    Projections are of quantised weights and activations where `rows_of` knows the weights. With `kv`, keys and
    values are seen as a float8 cache gives them back, those of the pass itself too. No gradients.
    """

    def __init__(self, rows_of: RowsOf | None = None, *, kv: bool = False):
        super().__init__()
        self._rows_of, self._kv = rows_of, kv

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = None if self._rows_of is None else self._rows_of((weight,))
        if rows is None:
            return super().linear(x, weight, bias)
        out = self._product(x, rows)
        return out if bias is None else out + bias

    def branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, weight, bias)

    def linears(self, x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
        if self._rows_of is None:
            return super().linears(x, layers)
        plain = [layer for layer in layers if type(layer) is nn.Linear]
        rows = self._rows_of(tuple(layer.weight for layer in plain)) if len(plain) == len(layers) else None
        if rows is None:
            return [self._alone(x, layer) for layer in layers]
        return _with_biases(self._product(x, rows), plain)

    def gated(self, x: Tensor, gate: nn.Module, up: nn.Module) -> Tensor:
        # Also before `FusedOps`, whose kernel would multiply with weights that are not quantised.
        return self.gated_silu(*self.linears(x, (gate, up)))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, layer: int, context: AttentionContext
    ) -> Tensor:
        return super().attention(q, k, v, rotation, layer, _Rounded(context) if self._kv else context)

    def _product(self, x: Tensor, weight: QuantizedRows) -> Tensor:
        return product(quantize_rows(x), weight, x.dtype)

    def _alone(self, x: Tensor, layer: nn.Module) -> Tensor:
        out = self.linear(x, layer.weight, layer.bias) if type(layer) is nn.Linear else layer(x)
        assert isinstance(out, Tensor)
        return out


class _Rounded:
    """A context to which keys and values come as a float8 cache keeps them."""

    def __init__(self, context: AttentionContext):
        self._context = context

    def attend(self, layer: int, q_thd: Tensor, k_tgd: Tensor, v_tgd: Tensor) -> Tensor:
        k_tgd, v_tgd = (to_float8(x).to(x.dtype) for x in (k_tgd, v_tgd))
        return self._context.attend(layer, q_thd, k_tgd, v_tgd)


def _with_biases(out: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    """The layers' columns of one product, each with its bias."""
    sizes = [layer.out_features for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    together = side_by_side(biases) if len(biases) == len(layers) else None
    if together is not None:
        return list((out + together).split(sizes, -1))
    parts = zip(out.split(sizes, -1), layers, strict=True)
    return [part if layer.bias is None else part + layer.bias for part, layer in parts]
