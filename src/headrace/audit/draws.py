"""Whether sampled tokens are those that were drawn, and supports those that sampling kept.

A token follows from its distribution and one number in [0, 1), which the turn's seed and the token's index give. So
a token that was exchanged for another, with the log-prob that this one has, shows: the number lies elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.sampling import Parameters, keep, seed_word, uniforms
from headrace.records import Turn

_ROWS = 64
"""Distributions over the whole vocabulary that are held at once."""


class Margin(NamedTuple):
    """How far rounding may move what a cut or a draw is decided by."""

    probability: float
    logit: float


def margin_of(engine: NativeEngineConfig) -> Margin:
    """FP8 and bfloat16 move single tokens by up to what `tolerance_of` allows them."""
    if "fp8" in (engine.kv_dtype, engine.weight_dtype):
        return Margin(0.5, 2.0)
    return Margin(0.1, 0.2) if engine.dtype == "bfloat16" else Margin(1e-3, 1e-3)


def draw_problems(hidden_td: Tensor, head_vd: Tensor, turn: Turn, rows: slice, margin: Margin) -> dict[int, str]:
    """What is wrong with the tokens of `rows`, by their places in the turn."""
    uniform_t = uniforms(np.full(len(turn.tokens), seed_word(turn.seed)), np.arange(len(turn.tokens)))
    found: dict[int, str] = {}
    for first in range(rows.start, rows.stop, _ROWS):
        places = slice(first, min(first + _ROWS, rows.stop))
        part_rd = hidden_td[places.start - rows.start : places.stop - rows.start]
        logits_rv = (part_rd @ head_vd.T).float().cpu()
        if turn.sampling.temperature > 0:
            logits_rv = logits_rv / float(np.float32(turn.sampling.temperature))
        found |= _problems(logits_rv, turn, places, uniform_t[places], margin)
    return found


def _problems(
    logits_rv: Tensor, turn: Turn, places: slice, uniform_r: np.ndarray, margin: Margin
) -> dict[int, str]:
    found: dict[int, str] = {}
    kept_rv = torch.ones_like(logits_rv, dtype=torch.bool)
    if turn.support is not None:
        kept_rv = _recorded(turn, places, logits_rv.shape[1])
        surely_rv, perhaps_rv = _bounds(logits_rv, turn, margin)
        wrong_r = ((surely_rv & ~kept_rv) | (kept_rv & ~perhaps_rv)).any(-1)
        for row in wrong_r.nonzero()[:, 0].tolist():
            has, expected = int(kept_rv[row].sum()), int(perhaps_rv[row].sum())
            found[places.start + row] = f"its support has {has} tokens, and sampling keeps others, some {expected}"
    cdf_rv = torch.softmax(logits_rv.masked_fill(~kept_rv, -torch.inf), -1).double().cumsum(-1)
    tokens_r = torch.from_numpy(turn.tokens[places].astype(np.int64))[:, None]
    after_r = cdf_rv.gather(1, tokens_r)[:, 0].numpy()
    before_r = np.where(tokens_r[:, 0] > 0, cdf_rv.gather(1, (tokens_r - 1).clamp(min=0))[:, 0].numpy(), 0.0)
    outside_r = (uniform_r < before_r - margin.probability) | (uniform_r > after_r + margin.probability)
    for row in np.flatnonzero(outside_r).tolist():
        lies = f"token {tokens_r[row, 0]} lies at [{before_r[row]:.4f}, {after_r[row]:.4f}] of its distribution"
        found.setdefault(places.start + row, f"{lies}, and {uniform_r[row]:.4f} was drawn")
    return found


def _recorded(turn: Turn, places: slice, vocabulary: int) -> Tensor:
    """(R, V) true where a token is in the recorded support. A row of nothing stands for everything."""
    assert turn.support is not None
    offsets = turn.support.offsets[places.start : places.stop + 1]
    sizes = np.diff(offsets)
    kept_rv = np.zeros((len(sizes), vocabulary), bool)
    kept_rv[np.repeat(np.arange(len(sizes)), sizes), turn.support.ids[offsets[0] : offsets[-1]]] = True
    kept_rv[sizes == 0] = True
    return torch.from_numpy(kept_rv)


def _bounds(logits_rv: Tensor, turn: Turn, margin: Margin) -> tuple[Tensor, Tensor]:
    """(tokens that sampling keeps however it rounds, tokens that it may keep)."""
    sampling = turn.sampling
    one = Parameters(*(np.array([getattr(sampling, name)]) for name in Parameters._fields))
    cut = one.top_p < 1
    looser = one._replace(
        top_p=np.where(cut, np.minimum(1 - 1e-9, one.top_p + margin.probability), 1.0),
        min_p=one.min_p * np.exp(-margin.logit),
    )
    tighter = one._replace(
        top_p=np.where(cut, np.maximum(1e-9, one.top_p - margin.probability), 1.0),
        min_p=np.minimum(1.0, one.min_p * np.exp(margin.logit)),
    )
    exact_rv, loose_rv, tight_rv = (_kept(logits_rv, parameters) for parameters in (one, looser, tighter))
    # Tokens whose logits are as good as equal may change places at a cut.
    best_left_out_r1 = logits_rv.masked_fill(exact_rv, -torch.inf).amax(-1, keepdim=True)
    least_kept_r1 = logits_rv.masked_fill(~loose_rv, torch.inf).amin(-1, keepdim=True)
    surely_rv = exact_rv & tight_rv & (logits_rv > best_left_out_r1 + margin.logit)
    return surely_rv, loose_rv | (logits_rv >= least_kept_r1 - margin.logit)


def _kept(logits_rv: Tensor, parameters: Parameters) -> Tensor:
    return keep(logits_rv, parameters.rows(np.zeros(len(logits_rv), np.int64)))
