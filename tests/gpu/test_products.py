"""Products by cuBLASLt's own algorithms and by our kernel: each computes the product, and those found are used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headrace.kernels import cublas, hopper_gate, products
from headrace.kernels.norm import rms_norm
from headrace.kernels.products import Products
from headrace.models.ops import ReferenceOps

pytestmark = pytest.mark.gpu


def draw(rows: int, columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, depth, generator=dice, device="cuda").bfloat16()
    weight = (0.02 * torch.randn(columns, depth, generator=dice, device="cuda")).bfloat16()
    # Our kernel fetches weights before the kernel before it has ended.
    torch.cuda.synchronize()
    return x, weight


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 512, 1024), (24, 1024, 2048), (256, 4096, 4096)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_algorithm_computes_the_product(rows, columns, depth, parts):
    x, weight = draw(rows, columns, depth)
    expected = x.double() @ weight.double().T
    product = cublas.Product(rows, columns, depth, x.stride(0), weight.stride(0), parts)
    tried = 0
    for algorithm in product.algorithms():
        found = product.run(algorithm, x, weight)
        whole = found if parts == 1 else found.sum(0)
        assert found.dtype == (torch.bfloat16 if parts == 1 else torch.float32)
        torch.testing.assert_close(whole.double(), expected, atol=2e-3, rtol=2**-8)
        tried += 1
    assert tried


def test_rows_may_lie_apart():
    x, weight = draw(16, 512, 1024)
    wide = torch.zeros(16, 2048, device="cuda", dtype=torch.bfloat16)
    wide[:, :1024] = x
    product = cublas.Product(16, 512, 1024, 2048, 1024)
    for algorithm in product.algorithms():
        torch.testing.assert_close(product.run(algorithm, wide[:, :1024], weight), F.linear(x, weight))


def test_a_size_is_tuned_once_and_only_where_that_is_allowed(monkeypatch):
    asked = []

    def fastest(x, weight, plain, share, others):
        asked.append(tuple(x.shape))
        return max(others, key=lambda way: way.parts)

    monkeypatch.setattr(products, "fastest", fastest)
    ours, (x, weight) = Products(), draw(32, 1024, 1024)
    assert ours.linear(x, weight, in_parts=True).shape == (32, 1024)
    with ours.tuning():
        ours.linear(x, weight, in_parts=True)
        ours.linear(x, weight, in_parts=True)
        ours.linear(x, weight)
    assert asked == [(32, 1024), (32, 1024)]
    parts = ours.linear(x, weight, in_parts=True)
    assert parts.shape == (4, 32, 1024)
    torch.testing.assert_close(parts.sum(0).bfloat16(), F.linear(x, weight))
    assert ours.linear(x, weight).shape == (32, 1024)


@pytest.mark.parametrize("in_parts", [True, False])
def test_the_way_that_was_found_is_right(in_parts):
    ours, (x, weight) = Products(), draw(256, 4096, 12288)
    with ours.tuning():
        found = ours.linear(x, weight, in_parts=in_parts)
    whole = found.sum(0).bfloat16() if found.dim() == 3 else found
    torch.testing.assert_close(whole, F.linear(x, weight), atol=0.02, rtol=2**-7)


def test_a_device_that_fails_to_try_ways_computes_the_plain_one(monkeypatch):
    asked = []

    def fastest(x, weight, plain, share, others):
        asked.append(tuple(x.shape))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(products, "fastest", fastest)
    shared = {}
    ours, (x, weight) = Products(shared), draw(32, 1024, 1024)
    with ours.tuning():
        with pytest.warns(RuntimeWarning, match="not tuned: out of memory"):
            found = ours.linear(x, weight, in_parts=True)
        again = ours.linear(x, weight, in_parts=True)
    assert torch.equal(found, F.linear(x, weight))
    assert torch.equal(again, found)
    assert asked == [(32, 1024)]
    assert shared == {}


# ── The gate inside its product ──────────────────────────────────────────────────────────────────────────


def apart(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ReferenceOps().gated_silu(*F.linear(x, weight).chunk(2, -1))


@pytest.mark.parametrize("tile", [tile for some in hopper_gate.TILES for tile in some])
@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [
        (1, 8, 8),
        (5, 104, 72),
        (64, 96, 64),
        (100, 1000, 512),
        (200, 3072, 1032),
        (256, 12288, 4096),
        (300, 960, 640),
    ],
)
def test_the_kernel_is_the_product_and_then_the_gate(rows, width, depth, tile):
    x, weight = draw(rows, 2 * width, depth)
    found, expected = hopper_gate.gated_product(x, weight, tile), apart(x, weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2**-6)
    # Sums in another order round otherwise now and then, not as a rule.
    assert (found != expected).float().mean() < 0.05


def test_the_kernel_reads_rows_that_lie_apart_and_writes_no_further_than_its_own():
    x, weight = draw(130, 2 * 200, 256)
    wide = torch.full((130, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :256] = x
    for tile in hopper_gate.tiles(130):
        torch.testing.assert_close(hopper_gate.gated_product(wide[:, :256], weight, tile), apart(x, weight))


def test_large_sums_are_gated_as_the_reference_does_and_nan_stays():
    x, weight = draw(64, 2 * 64, 64)
    x[:, 0] *= 1e4
    x[7, 3] = float("nan")
    found, expected = hopper_gate.gated_product(x, weight, hopper_gate.TILES[0][0]), apart(x, weight)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2**-6, equal_nan=True)


def test_what_the_kernel_does_not_serve_goes_the_plain_way():
    ours = Products()
    for rows, width, depth in ((16, 36, 32768), (16, 32768, 36)):
        x, weight = draw(rows, 2 * width, depth)
        assert not hopper_gate.serves(x, weight)
        with ours.tuning():
            torch.testing.assert_close(ours.gated(x, weight), apart(x, weight), atol=2e-3, rtol=2**-6)
    x, weight = draw(16, 128, 64)
    assert hopper_gate.serves(x, weight)
    assert not hopper_gate.serves(x.float(), weight.float())
    torch.testing.assert_close(ours.gated(x.float(), weight.float()), apart(x.float(), weight.float()))


def test_the_gated_way_that_was_found_is_right_and_safe_in_a_graph():
    ours, (x, weight) = Products(), draw(256, 2 * 12288, 4096)
    with ours.tuning():
        ours.gated(x, weight)
    graph = torch.cuda.CUDAGraph()
    scale = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph):
        # Overlaps with the product, whose blocks begin while it ends.
        normed = rms_norm(x, scale, 1e-6)
        found = ours.gated(normed, weight)
    for _ in range(20):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(found, apart(normed, weight), atol=2e-3, rtol=2**-6)
