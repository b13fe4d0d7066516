"""Forward passes over the Triton kernels, in which a row's result is the same bits in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels import attention as kernels
from headrace.kernels import logits
from headrace.kernels.gate import gated_silu
from headrace.kernels.matmul import linear
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.rotate import rotate
from headrace.models.attention import Spans

__all__ = ["add_rms_norm", "attend", "gated_silu", "linear", "plan", "rms_norm", "rotate", "score"]


def plan(spans: Spans, heads: int, groups: int, device: torch.device) -> Tensor:
    """The items of `attend`."""
    queries = kernels.INVARIANT.rows * groups // heads
    if not queries:
        most = kernels.INVARIANT.rows
        raise ConfigError(
            f"exact numerics serve at most {most} query heads per key head on CUDA",
            heads // groups,
            'set numerics = "fast"',
        )
    items = kernels.chunk_items(spans.tokens, spans.counts, spans.positions, spans.places, queries)
    return torch.from_numpy(items).to(device)


def attend(q_thd: Tensor, keys: Tensor, values: Tensor, work: Tensor) -> Tensor:
    """(T, H, D), over keys and values (X, G, D)."""
    out_thd = torch.empty(q_thd.shape, dtype=q_thd.dtype, device=q_thd.device)
    cache = kernels.Cache.packed(keys.contiguous(), values.contiguous())
    # Packed keys have no page table; any matrix stands for it.
    kernels.attend(q_thd, cache, work, work, out_thd, kernels.INVARIANT)
    return out_thd


def score(logits_cv: Tensor, temperature_c: Tensor, targets_c: Tensor) -> Tensor:
    """(C,) log-probs: the very bits that the engine's sampler records."""
    bound_c = torch.full_like(temperature_c, -torch.inf)
    known = logits_cv, temperature_c, bound_c, torch.full_like(targets_c, -1, dtype=torch.int32)
    return logits.score(*known, *logits.block_stats(*known), targets_c)
