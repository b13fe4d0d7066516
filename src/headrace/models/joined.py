"""Parameters that lie next to each other in memory, so that one product serves several projections of one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.models.config import ModelConfig


def join(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one new block, in order: views of it, in the tensors' shapes, without gradients.

    The tensors are of one dtype, one device and one shape but for the first dimension.
    """
    block = torch.cat([tensor.detach() for tensor in tensors])
    return list(block.split([tensor.shape[0] for tensor in tensors]))


def joined_names(config: ModelConfig) -> list[tuple[str, ...]]:
    """The parameters that `join` should lay side by side, group by group: those of one product."""
    groups = (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        ("mlp", ("gate_proj", "up_proj"), config.mlp_bias),
    )
    return [
        tuple(f"model.layers.{layer}.{block}.{name}.{kind}" for name in names)
        for layer in range(config.num_layers)
        for block, names, has_bias in groups
        for kind in (("weight", "bias") if has_bias else ("weight",))
    ]


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors that follow one another in one block of memory, or None where they do not."""
    first, last = tensors[0], tensors[-1]
    end, rows, kind = first.data_ptr(), 0, (first.dtype, first.shape[1:])
    for tensor in tensors:
        if tensor.data_ptr() != end or (tensor.dtype, tensor.shape[1:]) != kind or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
        rows += tensor.shape[0]
    return first.as_strided((rows, *kind[1]), first.stride()) if _in_one_block(first, last) else None


def abreast(matrices: Sequence[Tensor]) -> Tensor | None:
    """One view over matrices whose columns follow one another in the rows of one, or None where they do not."""
    first, last = matrices[0], matrices[-1]
    count, strides = first.shape[0], (first.stride(0), 1)
    end, columns, kind = first.data_ptr(), 0, (first.dtype, count)
    for matrix in matrices:
        if matrix.data_ptr() != end or (matrix.dtype, matrix.shape[0]) != kind or matrix.stride() != strides:
            return None
        end += matrix.shape[1] * matrix.itemsize
        columns += matrix.shape[1]
    return first.as_strided((count, columns), strides) if _in_one_block(first, last) else None


def _in_one_block(first: Tensor, last: Tensor) -> bool:
    """And so are all whose memory is between theirs."""
    return first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
