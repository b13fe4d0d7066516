"""x @ weightᵀ by the fastest algorithm that cuBLASLt has for its sizes, found by trying them on the device.

A decode step's products are small: the library's own choice is up to a sixth slower than its best kernel, and it
likes to cut K into parts that a second kernel sums. Here the parts may be left for the norm that follows, which
reads the result anyway. Sizes that were not tuned go PyTorch's way.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels import cublas

PARTS = (1, 2, 4)
MOST_ROWS = 512
"""Above, products fill the device, and the library chooses well."""
LEAST_GAIN = 0.97
"""Share of PyTorch's time that another algorithm must stay below: less is noise."""
SUM_BYTES_S = 2.5e12
"""What summing parts is reckoned to read a second: they come from L2."""
FINALISTS, ROUNDS = 4, 5
"""All are timed once, the best of them again."""
FLUSH_BYTES = 256 * 2**20
"""Written before each timed run. It evicts L2, and takes the device longer than a launch takes the host."""

_Key = tuple[int, int, int, int, int, bool]


class _Way(NamedTuple):
    product: cublas.Product
    algorithm: ctypes.Array[ctypes.c_uint64]


class Products:
    """Weights and inputs are bfloat16 on one CUDA device; anything else goes PyTorch's way. Not thread-safe."""

    def __init__(self) -> None:
        self._ways: dict[_Key, _Way | None] = {}
        self._tuning = False

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Within, sizes that are met for the first time are tuned; some milliseconds each. Not in a capture."""
        self._tuning = True
        try:
            yield
        finally:
            self._tuning = False

    def linear(self, x_mk: Tensor, weight_nk: Tensor, *, in_parts: bool = False) -> Tensor:
        """(M, N); with `in_parts` perhaps (P, M, N) in float32, whose sum over P it is."""
        if not _fits(x_mk, weight_nk):
            return F.linear(x_mk, weight_nk)
        (rows, depth), columns = x_mk.shape, weight_nk.shape[0]
        key = (rows, columns, depth, x_mk.stride(0), weight_nk.stride(0), in_parts)
        if self._tuning and key not in self._ways:
            self._ways[key] = _tuned(x_mk, weight_nk, PARTS if in_parts else PARTS[:1])
        way = self._ways.get(key)
        return F.linear(x_mk, weight_nk) if way is None else way.product.run(way.algorithm, x_mk, weight_nk)


def _fits(x_mk: Tensor, weight_nk: Tensor) -> bool:
    if not (x_mk.is_cuda and x_mk.dtype == weight_nk.dtype == torch.bfloat16 and x_mk.dim() == 2):
        return False
    aligned = (x_mk.data_ptr() | weight_nk.data_ptr()) % cublas.ALIGN_BYTES == 0
    return aligned and 0 < len(x_mk) <= MOST_ROWS and x_mk.stride(1) == weight_nk.stride(1) == 1


def _tuned(x_mk: Tensor, weight_nk: Tensor, parts: tuple[int, ...]) -> _Way | None:
    """`fastest`, or PyTorch's own where trying fails: an engine runs without it."""
    try:
        return fastest(x_mk, weight_nk, parts)
    except (RuntimeError, OSError) as error:
        warnings.warn(f"products are not tuned: {error}", RuntimeWarning, stacklevel=2)
        return None


def fastest(x_mk: Tensor, weight_nk: Tensor, parts: tuple[int, ...]) -> _Way | None:
    """None: PyTorch's own."""
    if not cublas.available():
        return None
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=x_mk.device)

    def seconds(way: _Way, rounds: int) -> float:
        product, algorithm = way
        return _summing_s(product) + _seconds(lambda: product.run(algorithm, x_mk, weight_nk), flush, rounds)

    tried = []
    for way in _ways(x_mk, weight_nk, parts):
        # The library proposes now and then what it then refuses to run.
        with suppress(RuntimeError):
            tried.append((seconds(way, 1), way))
    tried.sort(key=lambda one: one[0])
    best, chosen = LEAST_GAIN * _seconds(lambda: F.linear(x_mk, weight_nk), flush, ROUNDS), None
    for _, way in tried[:FINALISTS]:
        if (took := seconds(way, ROUNDS)) < best:
            best, chosen = took, way
    return chosen


def _ways(x_mk: Tensor, weight_nk: Tensor, parts: tuple[int, ...]) -> Iterator[_Way]:
    (rows, depth), columns = x_mk.shape, weight_nk.shape[0]
    for count in parts:
        if depth % (count * cublas.ALIGN_BYTES) == 0:
            product = cublas.Product(rows, columns, depth, x_mk.stride(0), weight_nk.stride(0), count)
            yield from (_Way(product, algorithm) for algorithm in product.algorithms())


def _summing_s(product: cublas.Product) -> float:
    """What the norm takes longer to read parts in float32 than one result in bfloat16."""
    more_bytes = 4 * product.parts - 2 if product.parts > 1 else 0
    return product.rows * product.columns * more_bytes / SUM_BYTES_S


def _seconds(run: Callable[[], Tensor], flush: Tensor, rounds: int) -> float:
    """Of the device, with a cold L2; the best of the rounds after a first one."""
    run()
    spans = []
    for _ in range(rounds):
        flush.zero_()
        span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        span[0].record()
        run()
        span[1].record()
        spans.append(span)
    torch.cuda.synchronize(flush.device)
    return 1e-3 * min(begin.elapsed_time(end) for begin, end in spans)
