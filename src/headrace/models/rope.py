"""Rotary frequencies, computed as transformers does, and the cos and sin tables of one forward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.errors import InputError
from headrace.models.config import ModelConfig


class Rotary:
    """Tables for given positions. Not a module: casting the model must not round the frequencies."""

    def __init__(self, config: ModelConfig):
        frequencies = inverse_frequencies(config)
        # cos is even and sin is odd: negating the first half here negates sin there, as `Ops.rope` wants.
        self._signed_frequencies = torch.cat((-frequencies, frequencies))
        self._scaling = attention_scaling(config)
        self._limit = config.max_sequence_length
        self._kind = config.rope.kind
        self._known: tuple[Tensor, Tensor] | None = None

    def know(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Keep the tables of all positions below `length`: then a pass only looks its own up."""
        self._known = None
        self._known = self.tables(torch.arange(length, device=device), dtype)

    def tables(self, positions_t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each (T, 1, head size): computed in float32, then cast. All layers share them."""
        known = self._known
        if known is not None and known[0].dtype == dtype and known[0].device == positions_t.device:
            return known[0].index_select(0, positions_t), known[1].index_select(0, positions_t)
        self._check(positions_t)
        if self._signed_frequencies.device != positions_t.device:
            self._signed_frequencies = self._signed_frequencies.to(positions_t.device)
        angles = positions_t.to(torch.float32)[:, None, None] * self._signed_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(dtype), sin.to(dtype)

    def _check(self, positions_t: Tensor) -> None:
        # Under CUDA graph capture nothing may be read back; there the engine's admission holds the limit.
        if self._limit is None or positions_t.numel() == 0:
            return
        if positions_t.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        length = int(positions_t.max()) + 1
        if length > self._limit:
            raise InputError(
                f"with rope_type {self._kind!r} a sequence must not be longer than {self._limit} tokens, "
                "because its rotation would depend on its length and no longer agree with cached keys",
                length,
                "shorten the sequences, or set rope_type to 'yarn' or 'linear' in config.json",
            )


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """(head size / 2,) float32, for sequences within `config.max_sequence_length`."""
    rope, dim = config.rope, config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / _number(rope.factor)
    if rope.kind == "yarn":
        return _yarn(config, rope.theta**exponents)
    if rope.kind == "llama3":
        return _llama3(config, plain)
    if rope.kind == "longrope":
        assert rope.short_factor is not None
        return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32, device="cpu") * rope.theta**exponents)
    return plain  # also dynamic NTK: within its window it is the plain rotation


def attention_scaling(config: ModelConfig) -> float:
    """What cos and sin are multiplied by."""
    rope = config.rope
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.kind == "yarn":
        factor = _number(rope.factor)
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_magnitude(factor, rope.mscale) / _yarn_magnitude(factor, rope.mscale_all_dim)
        return _yarn_magnitude(factor, 1.0)
    if rope.kind == "longrope":
        original = _number(rope.original_max_position_embeddings)
        factor = rope.factor if rope.factor is not None else config.max_position_embeddings / original
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: ModelConfig, wavelengths: Tensor) -> Tensor:
    """Fast pairs keep their frequency, slow ones are stretched by the factor, those between are blended."""
    rope, dim = config.rope, config.head_dim
    original = _number(rope.original_max_position_embeddings)

    def pair_turning(rotations: float) -> float:
        """The (fractional) index that turns this often within the original window."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast or 32), pair_turning(rope.beta_slow or 1)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return stretched / (_number(rope.factor) * wavelengths) + (1 - stretched) / wavelengths


def _llama3(config: ModelConfig, plain: Tensor) -> Tensor:
    """As yarn's idea, but the blend is linear in the number of turns."""
    rope = config.rope
    factor, original = _number(rope.factor), _number(rope.original_max_position_embeddings)
    low, high = _number(rope.low_freq_factor), _number(rope.high_freq_factor)
    turns = original / (2 * math.pi / plain)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def _number(value: float | None) -> float:
    assert value is not None  # RopeConfig.from_hf has required it for this kind
    return value
