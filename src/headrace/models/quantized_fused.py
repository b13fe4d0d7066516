"""FP8 projections on CUDA: activations quantised by a kernel, products in FP8 on the tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.norm import as_rows
from headrace.kernels.quantize import quantize_rows
from headrace.models.fused import FusedOps
from headrace.models.quantized import Fp8Ops, QuantizedRows, RowsOf


class FusedFp8Ops(Fp8Ops, FusedOps):
    """`FusedOps` whose projections are `Fp8Ops`'s, for bfloat16 and sizes divisible by 16. Inference only.

    A float8 cache needs nothing here: the kernel that writes it rounds. Off CUDA the projections are the
    reference's, as Triton's interpreter rounds to float8 in its own way.
    """

    def __init__(self, rows_of: RowsOf):
        super().__init__(rows_of)

    def _product(self, x: Tensor, weight: QuantizedRows) -> Tensor:
        if not x.is_cuda:
            return super()._product(x, weight)
        values, scales = quantize_rows(as_rows(x))
        out = torch._scaled_mm(
            values,
            weight.values.t(),
            scale_a=scales,
            scale_b=weight.scales.t(),
            out_dtype=x.dtype,
            use_fast_accum=False,  # fast sums keep about 13 bits
        )
        return out.view(*x.shape[:-1], -1)
