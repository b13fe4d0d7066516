"""From logits to tokens. Pure functions on (B, V) logits; rows may have different parameters.

The distribution of a row, in this order, each step on the renormalised result of the one before:

1. logits / temperature, in float32. Temperature 0 is greedy: the support is the single best token.
2. top-k: the k most probable tokens. 0 keeps all.
3. top-p: of the tokens by falling probability, the shortest beginning whose sum reaches top_p; never empty.
4. min-p: tokens with at least min_p times the probability of the most probable one.

Equal logits rank by id, the lower first, so every cut is deterministic. A token's log-prob is that of the
final renormalised distribution. A token with logit -inf is never in a support.

Shape letters: B rows, V vocabulary, R rows that truncate.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Parameters(NamedTuple):
    """One entry per row, as in `records.Sampling`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    def rows(self, rows: np.ndarray) -> Parameters:
        return Parameters(*(column[rows] for column in self))

    @property
    def truncates(self) -> np.ndarray:
        return (self.temperature == 0) | (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)


class Sampled(NamedTuple):
    tokens: np.ndarray
    """int64 (B,)."""
    logprobs: np.ndarray
    """float32 (B,). NaN where a row's logits hold NaN or +inf."""
    truncated: np.ndarray
    """Rows that truncate, rising (R,)."""
    supports: list[np.ndarray]
    """int32 ids, rising: what each row of `truncated` could have sampled."""


def sample(logits_bv: Tensor, uniform_b: np.ndarray, parameters: Parameters) -> Sampled:
    """One token per row by inverse CDF at `uniform_b`, in [0, 1)."""
    scaled_bv = logits_bv.float()
    temperature = parameters.temperature
    if (temperature != 1).any():
        # Greedy rows keep their logits: only the order matters.
        divisor = torch.from_numpy(np.where(temperature == 0, 1, temperature).astype(np.float32))
        scaled_bv = scaled_bv / divisor.to(scaled_bv.device)[:, None]
    truncated = np.flatnonzero(parameters.truncates)
    supports: list[np.ndarray] = []
    if len(truncated):
        rows = torch.from_numpy(truncated).to(scaled_bv.device)
        kept_rv = keep(scaled_bv[rows], parameters.rows(truncated))
        scaled_bv = scaled_bv.index_copy(0, rows, scaled_bv[rows].masked_fill(~kept_rv, -math.inf))
        supports = _ids(kept_rv)
    logprobs_bv = torch.log_softmax(scaled_bv, dim=-1)
    tokens_b1 = _inverse_cdf(logprobs_bv, torch.from_numpy(uniform_b).to(scaled_bv.device))
    logprobs_b = logprobs_bv.gather(1, tokens_b1)[:, 0]
    return Sampled(tokens_b1[:, 0].cpu().numpy(), logprobs_b.cpu().numpy(), truncated, supports)


def keep(scaled_rv: Tensor, parameters: Parameters) -> Tensor:
    """(R, V) true where a token is in its row's support. `scaled_rv` is already divided by temperature."""
    kept_rv = scaled_rv != -math.inf
    greedy = np.flatnonzero(parameters.temperature == 0)
    if len(greedy):
        rows = torch.from_numpy(greedy).to(scaled_rv.device)
        best = scaled_rv[rows].argmax(-1)
        kept_rv[rows] = False
        kept_rv[rows, best] = True
    ranked = np.flatnonzero((parameters.temperature > 0) & ((parameters.top_k > 0) | (parameters.top_p < 1)))
    if len(ranked):
        rows = torch.from_numpy(ranked).to(scaled_rv.device)
        kept_rv[rows] &= _top(scaled_rv[rows], parameters.top_k[ranked], parameters.top_p[ranked])
    if (parameters.min_p > 0).any():
        # A ratio of probabilities is a difference of logits, whatever they were normalised by.
        with np.errstate(divide="ignore"):
            least = torch.from_numpy(np.log(parameters.min_p).astype(np.float32)).to(scaled_rv.device)
        highest = scaled_rv.masked_fill(~kept_rv, -math.inf).amax(-1)
        kept_rv &= scaled_rv >= (highest + least)[:, None]
    return kept_rv


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Float64 in [0, 1), one per (request's seed, token's index), from nothing else.

    The `index`-th output of a SplitMix64 generator whose state begins at the hashed seed.
    """
    state = _hash(seeds) + (indices.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_hash(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def seed_word(seed: int) -> np.uint64:
    """Any integer seed as the 64 bits that `uniforms` takes."""
    return np.uint64(seed & _MASK)


def _hash(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _inverse_cdf(logprobs_bv: Tensor, uniform_b: Tensor) -> Tensor:
    # In float64: float32 sums of a large vocabulary lose the rare tokens.
    cdf_bv = logprobs_bv.exp().cumsum(-1, dtype=torch.float64)
    # The first entry above the target; a token of probability 0 adds nothing and is never the first.
    target_b1 = (uniform_b * cdf_bv[:, -1])[:, None]
    return torch.searchsorted(cdf_bv, target_b1, right=True).clamp_(max=logprobs_bv.shape[1] - 1)


def _top(scaled_rv: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    vocabulary = scaled_rv.shape[1]
    sorted_rv, order_rv = scaled_rv.sort(dim=-1, descending=True, stable=True)
    most = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)).to(scaled_rv.device)
    kept_rv = torch.arange(vocabulary, device=scaled_rv.device) < most[:, None]
    if (top_p < 1).any():
        probability_rv = torch.softmax(sorted_rv.masked_fill(~kept_rv, -math.inf), dim=-1).double()
        before_rv = probability_rv.cumsum(-1) - probability_rv
        # A row without top-p keeps all, also where rounding brings the sum before a token to 1.
        reach = torch.from_numpy(np.where(top_p < 1, top_p, 2.0)).to(scaled_rv.device)
        kept_rv &= before_rv < reach[:, None]
        kept_rv[:, 0] = True
    return torch.zeros_like(kept_rv).scatter_(1, order_rv, kept_rv)


def _ids(kept_rv: Tensor) -> list[np.ndarray]:
    rows, ids = kept_rv.nonzero(as_tuple=True)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(rows.cpu().numpy(), minlength=len(kept_rv)))]).tolist()
    flat = ids.cpu().numpy().astype(np.int32)
    return [flat[first:last] for first, last in pairwise(bounds)]
