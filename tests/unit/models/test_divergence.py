"""Divergences from a teacher against float64 and autograd over whole logits."""

from __future__ import annotations

import pytest
import torch

from headrace.models.divergence import Said, divergences

T, D, E, V = 23, 8, 12, 40


def plain(hidden, head, teacher: Said, temperature, outside, divergence: str, beta: float) -> torch.Tensor:
    """By the formulas, over the probabilities themselves."""
    scale = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    logits = [(hidden @ head.T) / scale, (teacher.hidden_te @ teacher.head_weight_ve.T) / scale]
    p, q = ((one.masked_fill(outside, -torch.inf)).softmax(-1) for one in logits)
    m = beta * q + (1 - beta) * p

    def kl(a, b):
        safe = torch.where(a > 0, a / b.clamp(min=1e-300), 1.0)
        return (a * safe.log()).sum(-1)

    return {"reverse": kl(p, q), "forward": kl(q, p), "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m)}[divergence]


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("temperature", [1.0, "each"])
@pytest.mark.parametrize(("divergence", "beta"), [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
@pytest.mark.parametrize("rows", [None, 5])
def test_values_and_gradients_are_the_formulas(supported, temperature, divergence, beta, rows) -> None:
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    hidden, head = some(T, D).requires_grad_(), some(V, D).requires_grad_()
    teacher = Said(some(T, E), some(V, E))
    at = 0.5 + torch.rand(T, generator=draw) if temperature == "each" else temperature
    outside = torch.zeros(T, V, dtype=torch.bool)
    support = None
    if supported:
        sizes = torch.randint(0, 6, (T,), generator=draw)  # none: all
        ids = [torch.randperm(V, generator=draw)[:size] for size in sizes.tolist()]
        support = torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        for row, chosen in enumerate(ids):
            if len(chosen):
                outside[row] = True
                outside[row, chosen] = False
    weights = some(T)
    found = divergences(hidden, head, teacher, at, support, divergence=divergence, beta=beta, chunk_rows=rows)
    assert found.dtype == torch.float32
    gradients = torch.autograd.grad((found * weights).sum(), (hidden, head))

    double = [x.detach().double().requires_grad_() for x in (hidden, head)]
    exact = plain(*double, Said(*(x.double() for x in teacher)), at, outside, divergence, beta)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad((exact * weights.double()).sum(), double)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_rows_that_only_one_of_them_has_are_left_out() -> None:
    hidden, head = torch.randn(T, D), torch.randn(V, D).requires_grad_()
    teacher = Said(torch.randn(T, E), torch.randn(V + 5, E))
    cut = Said(teacher.hidden_te, teacher.head_weight_ve[:V])
    assert torch.equal(divergences(hidden, head, teacher), divergences(hidden, head, cut))
    more = torch.cat([head, torch.full((3, D), 100.0)])
    assert torch.equal(
        divergences(hidden, more, Said(teacher.hidden_te, cut.head_weight_ve)), divergences(hidden, head, cut)
    )


def test_a_student_like_its_teacher_is_at_no_distance_and_stays() -> None:
    hidden, head = torch.randn(T, D).requires_grad_(), torch.randn(V, D)
    for divergence in ("reverse", "forward", "jsd"):
        found = divergences(hidden, head, Said(hidden.detach(), head), divergence=divergence)
        assert found.abs().max() < 1e-6
        (gradient,) = torch.autograd.grad(found.sum(), hidden)
        assert gradient.abs().max() < 1e-5
