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
    first = tensors[0]
    block, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        same_block = tensor.untyped_storage().data_ptr() == block and tensor.data_ptr() == end
        same_kind = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:]
        if not (same_block and same_kind and tensor.is_contiguous()):
            return None
        end += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def abreast(matrices: Sequence[Tensor]) -> Tensor | None:
    """One view over matrices whose columns follow one another in the rows of one, or None where they do not."""
    first = matrices[0]
    block, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for matrix in matrices:
        same_block = matrix.untyped_storage().data_ptr() == block and matrix.data_ptr() == end
        same_kind = matrix.dtype == first.dtype and len(matrix) == len(first)
        if not (same_block and same_kind and matrix.stride() == (first.stride(0), 1)):
            return None
        end += matrix.shape[1] * matrix.itemsize
    columns = sum(matrix.shape[1] for matrix in matrices)
    return first.as_strided((len(first), columns), first.stride())
