"""Rows of sampling parameters and logits, and one call of the sampler's kernels over them."""

from __future__ import annotations

import numpy as np
import torch

from headrace.engine.native.sampling import Parameters
from headrace.kernels.sampler import Sampler, SamplerInputs, SamplerOutputs
from headrace.kernels.truncation import expand_support

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 100
BLOCK = 64
# Of the cumulative sums, between the reference's order of adding and the kernels'.
ROUNDING = 1e-6


def parameters(*rows: tuple[float, int, float, float]) -> Parameters:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return Parameters(np.array(temperature, float), np.array(top_k), np.array(top_p, float), np.array(min_p, float))


def columns(rows: Parameters) -> tuple[torch.Tensor, ...]:
    kinds = (np.float32, np.int32, np.float32, np.float32)
    return tuple(torch.from_numpy(c.astype(kind)).to(DEVICE) for c, kind in zip(rows, kinds, strict=True))


def run(
    logits: torch.Tensor, uniform: np.ndarray, rows: Parameters, truncating: bool = True, capacity: int = VOCABULARY
) -> SamplerOutputs:
    count = len(logits)
    slots = torch.full((count,), -1, dtype=torch.int32, device=DEVICE)
    inputs = SamplerInputs(*columns(rows), torch.from_numpy(uniform).to(DEVICE), slots, slots.clone())
    return Sampler(count, logits.shape[1], DEVICE, capacity, BLOCK).sample(logits.to(DEVICE), inputs, truncating)


def support(found: SamplerOutputs, row: int) -> list[int]:
    assert found.supports is not None
    ids, counts, mask = (column.cpu().numpy() for column in found.supports)
    return expand_support(ids[row], int(counts[row]), mask[row]).tolist()


def scaled(logits: torch.Tensor, rows: Parameters) -> torch.Tensor:
    divisor = torch.from_numpy(np.where(rows.temperature == 0, 1, rows.temperature).astype(np.float32))
    return logits.float() / divisor[:, None]


def normals(count: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed))
