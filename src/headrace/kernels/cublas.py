"""cuBLASLt by its C interface: one product, x @ weightᵀ, with a choice of algorithms that PyTorch does not offer.

The library is the one that PyTorch has loaded. Matrices are row-major here and column-major there, so what it
computes is the transpose of the result: (weight)ᵀ stored as K × N, x as K × M, the result as N × M.
Shape letters: M rows, N columns (out features), K in features, P parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

ALIGN_BYTES = 256
"""What the library expects of addresses unless told otherwise."""
ASKED = 16
"""Algorithms asked of the library's own heuristic."""

_BF16, _FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSED = 14, 0, 68, 1
_TRANSA = 3
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_WORKSPACE = 1
_TILE, _CUSTOM, _STAGES, _CLUSTER = 1, 5, 6, 8
_HOPPER_KERNELS, _STAGES_AUTO = 66, 35

_Algorithm = c_uint64 * 8


class Choice(NamedTuple):
    """One of the library's kernels, by the numbers that its header gives them."""

    tile: int
    cluster: int
    custom: int


FOUND = (
    Choice(158, 5, 4), Choice(158, 7, 6), Choice(165, 7, 6), Choice(17, 2, 4), Choice(17, 5, 7), Choice(18, 5, 5),
    Choice(20, 2, 5), Choice(183, 9, 2), Choice(104, 4, 0), Choice(124, 4, 0), Choice(134, 3, 0), Choice(15, 3, 0),
)  # fmt: skip
"""The fastest for some product of Qwen3's 0.6B, 8B and 32B shapes at 64 or 256 rows, of 11,448 on an H200. The
heuristic proposes few of them."""


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Product:
    """x (M, K) @ weight (N, K)ᵀ of bfloat16, without workspace.

    Of the device that is current when it is made. With one part the result is (M, N) in bfloat16. With more, K is
    cut into as many, and the result is (P, M, N) in float32, to be summed.
    """

    def __init__(self, rows: int, columns: int, depth: int, x_stride: int, weight_stride: int, parts: int = 1):
        self.rows, self.columns, self.parts = rows, columns, parts
        self._library, self._handle = _library(torch.cuda.current_device())
        self._description = c_void_p()
        self._call("MatmulDescCreate", byref(self._description), _COMPUTE_FLOAT32, _FLOAT32)
        transposed = c_int32(_TRANSPOSED)
        self._call("MatmulDescSetAttribute", self._description, _TRANSA, byref(transposed), c_size_t(4))
        part = depth // parts
        out = _BF16 if parts == 1 else _FLOAT32
        self._weight = self._layout(_BF16, part, columns, weight_stride, part)
        self._x = self._layout(_BF16, part, rows, x_stride, part)
        self._out = self._layout(out, columns, rows, columns, rows * columns)

    def algorithms(self) -> Iterator[ctypes.Array[c_uint64]]:
        """What the heuristic proposes, and those of FOUND that fit."""
        preference, none, count = c_void_p(), c_size_t(0), c_int()
        self._call("MatmulPreferenceCreate", byref(preference))
        self._call("MatmulPreferenceSetAttribute", preference, _WORKSPACE, byref(none), c_size_t(8))
        proposed = (_Heuristic * ASKED)()
        layouts = self._weight, self._x, self._out, self._out
        found = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._description, *layouts, preference, ASKED, proposed, byref(count)
        )
        if found == 0:
            yield from (_Algorithm(*proposed[i].algorithm) for i in range(count.value))
        self._call("MatmulPreferenceDestroy", preference)
        out = _BF16 if self.parts == 1 else _FLOAT32
        for choice in FOUND:
            algorithm, checked = _Algorithm(), _Heuristic()
            types = _COMPUTE_FLOAT32, _FLOAT32, _BF16, _BF16, out, out
            if self._library.cublasLtMatmulAlgoInit(self._handle, *types, _HOPPER_KERNELS, byref(algorithm)):
                continue
            for name, value in ((_TILE, choice.tile), (_CUSTOM, choice.custom), (_STAGES, _STAGES_AUTO)):
                number = c_int32(value)
                self._library.cublasLtMatmulAlgoConfigSetAttribute(
                    byref(algorithm), name, byref(number), c_size_t(4)
                )
            cluster = c_uint16(choice.cluster)
            self._library.cublasLtMatmulAlgoConfigSetAttribute(
                byref(algorithm), _CLUSTER, byref(cluster), c_size_t(2)
            )
            bad = self._library.cublasLtMatmulAlgoCheck(
                self._handle, self._description, *layouts, byref(algorithm), byref(checked)
            )
            if not bad and not checked.workspace:
                yield algorithm

    def run(self, algorithm: ctypes.Array[c_uint64], x_mk: Tensor, weight_nk: Tensor) -> Tensor:
        """On the current stream. Addresses are multiples of ALIGN_BYTES."""
        shape = (self.rows, self.columns) if self.parts == 1 else (self.parts, self.rows, self.columns)
        out = torch.empty(shape, dtype=x_mk.dtype if self.parts == 1 else torch.float32, device=x_mk.device)
        there, stream = c_void_p(out.data_ptr()), c_void_p(torch.cuda.current_stream(x_mk.device).cuda_stream)
        self._call(
            "Matmul", self._description, byref(c_float(1)), c_void_p(weight_nk.data_ptr()), self._weight,
            c_void_p(x_mk.data_ptr()), self._x, byref(c_float(0)), there, self._out, there, self._out,
            byref(algorithm), c_void_p(0), c_size_t(0), stream,
        )  # fmt: skip
        return out

    def _layout(self, kind: int, rows: int, columns: int, stride: int, batch_stride: int) -> c_void_p:
        layout = c_void_p()
        self._call("MatrixLayoutCreate", byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(stride))
        if self.parts > 1:
            count, apart = c_int32(self.parts), c_int64(batch_stride)
            self._call("MatrixLayoutSetAttribute", layout, _BATCH_COUNT, byref(count), c_size_t(4))
            self._call("MatrixLayoutSetAttribute", layout, _BATCH_STRIDE, byref(apart), c_size_t(8))
        return layout

    def _call(self, name: str, *arguments: object) -> None:
        first = (self._handle,) if name == "Matmul" else ()
        status = getattr(self._library, f"cublasLt{name}")(*first, *arguments)
        if status:
            raise RuntimeError(f"cublasLt{name} answered {status}")


def available() -> bool:
    return _path() is not None


@cache
def _library(device: int) -> tuple[ctypes.CDLL, c_void_p]:
    """(the library, a handle of this device)."""
    path = _path()
    assert path is not None
    library, handle = ctypes.CDLL(path), c_void_p()
    if status := library.cublasLtCreate(byref(handle)):
        raise RuntimeError(f"cublasLtCreate answered {status}")
    return library, handle


@cache
def _path() -> str | None:
    """Of the library in this process."""
    if not torch.cuda.is_available():
        return None
    # The first product loads it.
    one = torch.ones(16, 16, device="cuda")
    torch.mm(one, one)
    with open("/proc/self/maps") as maps:
        return next((line.split(maxsplit=5)[5].strip() for line in maps if "libcublasLt.so" in line), None)
