"""Against attention written out in float64; on a GPU in bfloat16, by the kernel."""

from __future__ import annotations

import pytest
import torch

from headrace.models.ragged import Ragged, has_kernel, ragged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def plain(q, k, v, queries, keys):
    out, first_query, first_key = [], 0, 0
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    for own, seen in zip(queries, keys, strict=True):
        for i in range(own):
            places = slice(first_key, first_key + seen - own + 1 + i)
            scores = torch.einsum("hd,khd->hk", q[first_query + i], k[places]) / q.shape[-1] ** 0.5
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[places]))
        first_query, first_key = first_query + own, first_key + seen
    return torch.stack(out)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    ("queries", "keys"), [([1], [1]), ([3, 70, 1], [3, 70, 1]), ([5, 1, 20], [9, 300, 20])], ids=str
)
def test_queries_see_the_keys_up_to_their_own(heads, queries, keys):
    dice = torch.Generator().manual_seed(0)
    shapes = (sum(queries), heads[0], 32), (sum(keys), heads[1], 32), (sum(keys), heads[1], 32)
    given = [torch.randn(shape, generator=dice).to(DEVICE, DTYPE) for shape in shapes]
    weights = torch.randn(shapes[0], generator=dice).to(DEVICE, DTYPE)
    leaves = [x.clone().requires_grad_() for x in given]
    doubles = [x.double().requires_grad_() for x in given]
    found = ragged_attention(*leaves, Ragged.of(queries, keys, DEVICE))
    expected = plain(*doubles, queries, keys)
    close = {"rtol": 2e-2, "atol": 2e-2} if DEVICE == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **close)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    for one, another in zip(
        gradients, torch.autograd.grad((expected * weights.double()).sum(), doubles), strict=True
    ):
        torch.testing.assert_close(one.double(), another, **close)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_a_row_may_be_a_key_of_several_sequences(heads):
    dice = torch.Generator().manual_seed(0)
    shapes = [(7, count, 32) for count in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, weights = (torch.randn(shape, generator=dice).to(DEVICE, DTYPE) for shape in shapes)
    rows = torch.tensor([0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 4, 6])
    queries, keys = [4, 2, 1], [4, 4, 4]
    leaves, others = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    found = ragged_attention(*leaves, Ragged.of(queries, keys, DEVICE, rows))
    there = rows.to(DEVICE)
    expected = ragged_attention(
        others[0], *(x.index_select(0, there) for x in others[1:]), Ragged.of(queries, keys, DEVICE)
    )
    assert torch.equal(found, expected)
    gradients = (
        torch.autograd.grad((out * weights).sum(), of) for out, of in ((found, leaves), (expected, others))
    )
    for one, another in zip(*gradients, strict=True):
        torch.testing.assert_close(one, another, rtol=2e-2, atol=2e-2 if DEVICE == "cuda" else 1e-6)


@pytest.mark.parametrize("queries", [[], [3, 0]], ids=str)
def test_sequences_without_queries_are_refused(queries):
    with pytest.raises(ValueError, match="a packed batch needs sequences of at least one token, got ") as refusal:
        Ragged.of(queries, queries, DEVICE)
    assert str(refusal.value).endswith(str(queries))


def test_there_is_a_kernel_for_half_precision_on_newer_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert has_kernel("cuda", torch.bfloat16, 128)
    assert not has_kernel("cuda", torch.float32, 128)
    assert not has_kernel("cuda", torch.bfloat16, 20)
    assert not has_kernel("cuda", torch.bfloat16, 512)
    assert not has_kernel("cpu", torch.bfloat16, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not has_kernel("cuda", torch.bfloat16, 128)
