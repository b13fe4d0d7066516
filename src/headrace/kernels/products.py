"""x @ weightᵀ by the fastest way there is for its sizes, found by trying them on the device.

A decode step's products are small: cuBLASLt's own choice is up to a sixth slower than its best kernel, and it likes
to cut K into parts that a second kernel sums. Here the parts may be left for the norm that follows, which reads the
result anyway. The gate of an MLP may be inside its product (`kernels.hopper_gate`). Sizes that were not tuned go
PyTorch's way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels import cublas, hopper_gate
from headrace.kernels.gate import gated_silu

PARTS = (1, 2, 4)
MOST_ROWS = 512
"""Above, products fill the device, and the library chooses well."""
LEAST_WEIGHT_BYTES = 2 * 2**20
"""Below, a product takes little longer than any kernel, and tuning longer than it will ever save."""
LEAST_GAIN, WITH_GATE = 0.98, 1.02
"""Share of the plain way's time that another must stay below: less is noise. A gate inside the product may take
more, as alone it does not show that the kernel before it ends meanwhile and that L2 has less to do."""
SUM_BYTES_S = 8e12
"""What a norm that sums parts was seen to read more, a second: they come from L2."""
FINALISTS = 4
"""Of all ways, each timed once. Large products draw all the power that the card may, and then its clock falls: what
is fastest for a moment need not be so for long."""
LONG_S, ROUNDS = 0.004, 4
"""How long a finalist runs at a time, and how often, in turns."""
FLUSH_BYTES = 256 * 2**20
"""More than L2 holds. Weights are copied until there are so many bytes: each product reads them from memory."""
MOST_COPIES = 64

_Run = Callable[[Tensor, Tensor], Tensor]


class Way(NamedTuple):
    """One that a product can be computed by."""

    run: _Run
    """Of x and weight, on the current stream."""
    parts: int = 1


Found = dict[tuple[float, ...], Way]
"""By device and sizes."""


class Products:
    """Of weights and inputs in bfloat16 on a CUDA device; anything else goes PyTorch's way. Not thread-safe.

    What is found for sizes goes into `found`, which others may share.
    """

    def __init__(self, found: Found | None = None) -> None:
        self._found: Found = {} if found is None else found
        self._failed: set[tuple[float, ...]] = set()
        self._tuning = False

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Within, sizes that are met for the first time are tuned; tenths of a second each. Not in a capture."""
        self._tuning = True
        try:
            yield
        finally:
            self._tuning = False

    def linear(self, x_mk: Tensor, weight_nk: Tensor, *, in_parts: bool = False) -> Tensor:
        """(M, N); with `in_parts` perhaps (P, M, N) in float32, whose sum over P it is."""
        plain, parts = Way(F.linear), PARTS if in_parts else PARTS[:1]
        return self._by(x_mk, weight_nk, plain, LEAST_GAIN, lambda: _by_library(x_mk, weight_nk, parts), in_parts)

    def gated(self, x_mk: Tensor, weight_nk: Tensor) -> Tensor:
        """silu(x @ gateᵀ) · (x @ upᵀ), (M, N / 2), of weights that are gate's rows and then up's."""
        plain = Way(lambda x, weight: gated_silu(*self.linear(x, weight).chunk(2, -1)))
        return self._by(x_mk, weight_nk, plain, WITH_GATE, lambda: _by_our_kernel(x_mk, weight_nk))

    def _by(
        self,
        x_mk: Tensor,
        weight_nk: Tensor,
        plain: Way,
        share: float,
        others: Callable[[], Iterator[Way]],
        in_parts: bool = False,
    ) -> Tensor:
        """The result, by the way that was found for these sizes, now if that is allowed; by `plain` if none was."""
        if not _fits(x_mk, weight_nk):
            return plain.run(x_mk, weight_nk)
        key = (x_mk.get_device(), share, in_parts, *x_mk.shape, len(weight_nk), x_mk.stride(0), weight_nk.stride(0))
        if self._tuning and key not in self._found and key not in self._failed:
            if found := _tuned(x_mk, weight_nk, plain, share, others):
                self._found[key] = found
            else:
                self._failed.add(key)
        return self._found.get(key, plain).run(x_mk, weight_nk)


def _fits(x_mk: Tensor, weight_nk: Tensor) -> bool:
    if not (x_mk.is_cuda and x_mk.dtype == weight_nk.dtype == torch.bfloat16 and x_mk.dim() == 2):
        return False
    aligned = (x_mk.data_ptr() | weight_nk.data_ptr()) % cublas.ALIGN_BYTES == 0
    large = weight_nk.numel() * weight_nk.element_size() >= LEAST_WEIGHT_BYTES
    return aligned and large and 0 < len(x_mk) <= MOST_ROWS and x_mk.stride(1) == weight_nk.stride(1) == 1


def _by_library(x_mk: Tensor, weight_nk: Tensor, parts: Sequence[int]) -> Iterator[Way]:
    (rows, depth), columns = x_mk.shape, weight_nk.shape[0]
    for count in parts if cublas.available() else ():
        if depth % (count * cublas.ALIGN_BYTES) == 0:
            product = cublas.Product(rows, columns, depth, x_mk.stride(0), weight_nk.stride(0), count)
            yield from (Way(partial(product.run, algorithm), count) for algorithm in product.algorithms())


def _by_our_kernel(x_mk: Tensor, weight_nk: Tensor) -> Iterator[Way]:
    if hopper_gate.serves(x_mk, weight_nk):
        yield from (Way(partial(hopper_gate.gated_product, tile=tile)) for tile in hopper_gate.tiles(len(x_mk)))


def _tuned(
    x_mk: Tensor, weight_nk: Tensor, plain: Way, share: float, others: Callable[[], Iterator[Way]]
) -> Way | None:
    """`fastest`, or None where trying fails: an engine runs without it, and the next may have more memory."""
    try:
        return fastest(x_mk, weight_nk, plain, share, others())
    except (RuntimeError, OSError) as error:
        warnings.warn(f"products are not tuned: {error}", RuntimeWarning, stacklevel=2)
        return None


def fastest(x_mk: Tensor, weight_nk: Tensor, plain: Way, share: float, others: Iterator[Way]) -> Way:
    """The plain way if no other stays below that share of its time."""
    sieved = _sieved(x_mk, weight_nk, others)
    if not sieved:
        return plain
    copies = min(MOST_COPIES, -(-FLUSH_BYTES // (weight_nk.numel() * weight_nk.element_size())))
    weights = [weight_nk, *(weight_nk.clone() for _ in range(copies - 1))]
    trials = [_Trial(way, x_mk, weights) for way in (plain, *sieved)]
    for _ in range(ROUNDS):
        for trial in trials:
            trial.run(LONG_S)
    trials[0].best *= share
    return min(trials, key=lambda trial: trial.best).way


def _sieved(x_mk: Tensor, weight_nk: Tensor, ways: Iterator[Way]) -> list[Way]:
    """The best, each run alone and with a cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=x_mk.device)
    tried: list[tuple[float, int, Way]] = []
    for way in ways:
        # The library proposes now and then what it then refuses to run.
        with suppress(RuntimeError):
            way.run(x_mk, weight_nk)
            # Takes the device longer than a launch takes the host.
            flush.zero_()
            seconds = _seconds(partial(way.run, x_mk, weight_nk))
            tried.append((seconds + _summing_s(x_mk, weight_nk, way.parts), len(tried), way))
    return [way for *_, way in sorted(tried)[:FINALISTS]]


class _Trial:
    """A way's time on the device, in a graph: some take less time there than their launch takes the host."""

    def __init__(self, way: Way, x_mk: Tensor, weights: list[Tensor]):
        self.way, self.best = way, float("inf")
        self._count = len(weights)
        self._summing_s = _summing_s(x_mk, weights[0], way.parts)
        self._graph = torch.cuda.CUDAGraph()
        way.run(x_mk, weights[0])
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            # Another thread may be copying weights meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            for weight in weights:
                way.run(x_mk, weight)
            self._graph.capture_end()
        here.wait_stream(aside)

    def run(self, seconds: float) -> None:
        """Again and again for about so long; keeps the least time of a product."""
        once = _seconds(self._graph.replay)
        times = max(1, round(seconds / once))

        def replay() -> None:
            for _ in range(times):
                self._graph.replay()

        self.best = min(self.best, _seconds(replay) / (times * self._count) + self._summing_s)


def _summing_s(x_mk: Tensor, weight_nk: Tensor, parts: int) -> float:
    """What the norm takes longer to read parts in float32 than one result in bfloat16."""
    return len(x_mk) * len(weight_nk) * (4 * parts - 2) / SUM_BYTES_S if parts > 1 else 0.0


def _seconds(run: Callable[[], object]) -> float:
    """On the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)
