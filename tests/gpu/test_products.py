"""Products by cuBLASLt's own algorithms: each of them computes the product, and the tuned ones are used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headrace.kernels import cublas, products
from headrace.kernels.products import Products

pytestmark = pytest.mark.gpu


def draw(rows: int, columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, depth, generator=dice, device="cuda").bfloat16()
    weight = (0.02 * torch.randn(columns, depth, generator=dice, device="cuda")).bfloat16()
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

    def fastest(x, weight, parts):
        asked.append((tuple(x.shape), parts))
        product = cublas.Product(len(x), len(weight), x.shape[1], x.stride(0), weight.stride(0), parts[-1])
        return products._Way(product, next(iter(product.algorithms())))

    monkeypatch.setattr(products, "fastest", fastest)
    ours, (x, weight) = Products(), draw(32, 1024, 1024)
    assert ours.linear(x, weight, in_parts=True).shape == (32, 1024)
    with ours.tuning():
        ours.linear(x, weight, in_parts=True)
        ours.linear(x, weight, in_parts=True)
        ours.linear(x, weight)
    assert asked == [((32, 1024), (1, 2, 4)), ((32, 1024), (1,))]
    parts = ours.linear(x, weight, in_parts=True)
    assert parts.shape == (4, 32, 1024)
    torch.testing.assert_close(parts.sum(0).bfloat16(), F.linear(x, weight))
    assert ours.linear(x, weight).shape == (32, 1024)


def test_the_fastest_way_is_right_and_no_slower_than_pytorch_s():
    x, weight = draw(256, 4096, 12288)
    way = products.fastest(x, weight, products.PARTS)
    if way is not None:
        found = way.product.run(way.algorithm, x, weight)
        whole = found if way.product.parts == 1 else found.sum(0).bfloat16()
        torch.testing.assert_close(whole, F.linear(x, weight), atol=0.02, rtol=2**-7)
