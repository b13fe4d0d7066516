"""Divergences from a teacher against the formulas, token by token, in decimal numbers of forty digits."""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from typing import NamedTuple

import pytest
import torch

from headrace.models import divergence as under_test
from headrace.models.divergence import Said, divergences

T, D, V = 13, 4, 9
STEP = 2.0**-17
"""Whole multiples of it, below 128, have their products with small integers, and the sums of these, in float32."""
KINDS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.1)]
TEMPERATURES = {"1": 1.0, "0.7": 0.7, "each": torch.linspace(0.5, 1.5, T, dtype=torch.float64).float()}


class Inputs(NamedTuple):
    """Whose logits are the same numbers in float32 and in float64."""

    hidden: torch.Tensor
    head: torch.Tensor
    teacher: Said

    def to(self, dtype: torch.dtype) -> Inputs:
        own = (x.to(dtype, copy=True).requires_grad_() for x in self[:2])
        return Inputs(*own, Said(*(x.to(dtype) for x in self.teacher)))


class Row(NamedTuple):
    value: float
    slopes: list[float]
    """In the student's logits."""


def inputs_of(kind: str) -> Inputs:
    draw = torch.Generator().manual_seed(7)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=draw).double()

    def numbers(*shape: int, size: float) -> torch.Tensor:
        return (size * torch.randn(*shape, generator=draw, dtype=torch.float64) / STEP).round() * STEP

    hidden, head = integers(T, D), numbers(V, D, size=0.7)
    if kind == "random":
        return Inputs(hidden, head, Said(integers(T, D + 2), numbers(V, D + 2, size=0.7)))
    if kind == "nearly equal":
        other = head + STEP * torch.randint(-1, 2, (V, D), generator=draw)
        return Inputs(hidden, head, Said(hidden, other))
    assert kind == "extreme"
    signs = [torch.randint(0, 2, shape, generator=draw).double() * 2 - 1 for shape in [(T, D), (V, D)] * 2]
    return Inputs(signs[0], 20 * signs[1] + head, Said(signs[2], 20 * signs[3] + numbers(V, D, size=0.7)))


def support_of(kind: str) -> tuple[list[list[int]], tuple[torch.Tensor, torch.Tensor] | None]:
    """(each row's ids, what is given)."""
    draw = torch.Generator().manual_seed(1)
    if kind == "none":
        return [list(range(V))] * T, None
    sizes = [1] * T if kind == "single" else torch.randint(0, 6, (T,), generator=draw).tolist()
    rows = [torch.randperm(V, generator=draw)[:size].tolist() for size in sizes]
    given = torch.tensor([i for row in rows for i in row]), torch.tensor([0, *sizes]).cumsum(0)
    # None of them stand for all of them.
    return [row or list(range(V)) for row in rows], given


def by_the_formulas(
    inputs: Inputs, temperature: torch.Tensor | float, support: list[list[int]], divergence: str, beta: float
) -> list[Row]:
    with localcontext(Context(prec=40)):
        at = temperature.tolist() if isinstance(temperature, torch.Tensor) else [temperature] * T
        return [
            _row(
                _probs(inputs.hidden[row], inputs.head, at[row], ids),
                _probs(inputs.teacher.hidden_te[row], inputs.teacher.head_weight_ve, at[row], ids),
                Decimal(at[row]),
                divergence,
                Decimal(beta),
            )
            for row, ids in enumerate(support)
        ]


def _probs(hidden: torch.Tensor, head: torch.Tensor, temperature: float, ids: list[int]) -> dict[int, Decimal]:
    columns = {i: zip(hidden.tolist(), head[i].tolist(), strict=True) for i in ids}
    logits = {i: sum(Decimal(a) * Decimal(b) for a, b in column) for i, column in columns.items()}
    weights = {i: (logit / Decimal(temperature)).exp() for i, logit in logits.items()}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


def _row(q: dict[int, Decimal], p: dict[int, Decimal], at: Decimal, divergence: str, beta: Decimal) -> Row:
    """`q` is the policy's and `p` the teacher's, as in docs/off-policy.md."""
    m = {i: beta * p[i] + (1 - beta) * q[i] for i in q}

    def kl(a: dict[int, Decimal], b: dict[int, Decimal]) -> Decimal:
        return sum((a[i] * (a[i] / b[i]).ln() for i in a), Decimal(0))

    # In the probabilities q, up to a constant; then q_i = softmax(logits / at)_i.
    value, slope = {
        "forward": (kl(p, q), {i: -p[i] / q[i] for i in q}),
        "reverse": (kl(q, p), {i: (q[i] / p[i]).ln() for i in q}),
        "jsd": (beta * kl(p, m) + (1 - beta) * kl(q, m), {i: (1 - beta) * (q[i] / m[i]).ln() for i in q}),
    }[divergence]
    mean = sum(q[i] * slope[i] for i in q)
    return Row(float(value), [float(q[i] * (slope[i] - mean) / at) if i in q else 0.0 for i in range(V)])


def assert_near(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    atol = relative * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=atol)


@pytest.mark.parametrize("chunk_rows", [None, 5])
@pytest.mark.parametrize("support", ["none", "some", "single"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("divergence", "beta"), KINDS)
@pytest.mark.parametrize("kind", ["random", "nearly equal", "extreme"])
def test_values_and_gradients_are_the_formulas(
    kind: str, divergence: str, beta: float, temperature: str, support: str, chunk_rows: int | None
) -> None:
    exact, at = inputs_of(kind), TEMPERATURES[temperature]
    rows, given = support_of(support)
    expected = by_the_formulas(exact, at, rows, divergence, beta)
    weights = torch.linspace(-1, 2, T, dtype=torch.float64)
    slopes = weights[:, None] * torch.tensor([row.slopes for row in expected], dtype=torch.float64)
    for dtype, relative in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        mine = exact.to(dtype)
        found = divergences(*mine, at, given, divergence=divergence, beta=beta, chunk_rows=chunk_rows)  # type: ignore[arg-type]
        assert found.dtype == dtype
        assert (found >= 0).all()
        values = torch.tensor([row.value for row in expected], dtype=torch.float64)
        torch.testing.assert_close(found.double(), values, rtol=relative, atol=0)
        of_hidden, of_head = torch.autograd.grad((found * weights.to(dtype)).sum(), mine[:2])
        assert_near(of_hidden, slopes @ exact.head, relative)
        assert_near(of_head, slopes.T @ exact.hidden, relative)


@pytest.mark.parametrize("support", ["none", "some"])
@pytest.mark.parametrize(("divergence", "beta"), KINDS)
def test_gradients_are_the_finite_differences(divergence: str, beta: float, support: str) -> None:
    inputs, given = inputs_of("random").to(torch.float64), support_of(support)[1]
    weights = torch.linspace(-1, 2, T, dtype=torch.float64)

    def total(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        found = divergences(hidden, head, inputs.teacher, 0.7, given, divergence=divergence, beta=beta)  # type: ignore[arg-type]
        return (found * weights).sum()

    gradients = torch.autograd.grad(total(*inputs[:2]), inputs[:2])
    step = 1e-5
    for which, gradient in enumerate(gradients):
        found = torch.empty_like(gradient)
        for place in range(gradient.numel()):
            ends = []
            for sign in (1, -1):
                moved = [x.detach().clone() for x in inputs[:2]]
                moved[which].view(-1)[place] += sign * step
                ends.append(total(*moved))
            found.view(-1)[place] = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(gradient, found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
def test_without_tokens_there_is_nothing(divergence: str, dtype: torch.dtype) -> None:
    hidden, head = torch.empty(0, D, dtype=dtype).requires_grad_(), torch.ones(V, D, dtype=dtype).requires_grad_()
    said = Said(torch.empty(0, D, dtype=dtype), torch.ones(V, D, dtype=dtype))
    for support in (None, (torch.empty(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))):
        found = divergences(hidden, head, said, 0.7, support, divergence=divergence)  # type: ignore[arg-type]
        assert found.shape == (0,)
        of_hidden, of_head = torch.autograd.grad(found.sum(), (hidden, head))
        assert of_hidden.shape == (0, D)
        assert torch.equal(of_head, torch.zeros_like(head))


def test_bfloat16_gives_the_float32_divergence_of_its_logits() -> None:
    inputs = inputs_of("random").to(torch.bfloat16)
    found = divergences(*inputs, 0.7)
    logits = [(a @ b.T).float() for a, b in (inputs[:2], inputs.teacher)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, divergences(logits[0], torch.eye(V), Said(logits[1], torch.eye(V)), 0.7))


@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
def test_a_chunk_s_rows_are_summed_some_at_a_time(divergence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, given = inputs_of("random").to(torch.float64), support_of("some")[1]
    found = []
    for elements in (T * V, 3 * V, 1):
        monkeypatch.setitem(under_test._PART_ELEMENTS, "cpu", elements)
        values = divergences(*inputs, 0.7, given, divergence=divergence)  # type: ignore[arg-type]
        found.append((values, *torch.autograd.grad(values.sum(), inputs[:2])))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_rows_that_only_one_of_them_has_are_left_out() -> None:
    hidden, head = torch.randn(T, D), torch.randn(V, D).requires_grad_()
    teacher = Said(torch.randn(T, D), torch.randn(V + 5, D))
    cut = Said(teacher.hidden_te, teacher.head_weight_ve[:V])
    assert torch.equal(divergences(hidden, head, teacher), divergences(hidden, head, cut))
    more = torch.cat([head, torch.full((3, D), 100.0)])
    assert torch.equal(
        divergences(hidden, more, Said(teacher.hidden_te, cut.head_weight_ve)), divergences(hidden, head, cut)
    )


@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize(("divergence", "beta"), KINDS)
@pytest.mark.parametrize("fewer", ["student", "teacher"])
def test_ids_that_only_one_of_them_has_are_left_out_of_a_support_too(
    fewer: str, divergence: str, beta: float, chunk_rows: int | None
) -> None:
    hidden, head, teacher = inputs_of("random").to(torch.float64)
    rows = {"student": (6, V), "teacher": (V, 6)}[fewer]
    # The third row has no id of both, the fourth all of them.
    recorded = [[0, 3, 7], [8, 2], [6, 8], [], [1, 4]]
    common = [[0, 3], [2], [], [0, 1, 2, 3, 4, 5], [1, 4]]
    hidden = hidden[:5].detach().requires_grad_()
    found, expected = (
        divergences(
            hidden,
            head[: size[0]],
            Said(teacher.hidden_te[:5], teacher.head_weight_ve[: size[1]]),
            0.7,
            (torch.tensor([i for row in ids for i in row]), torch.tensor([0, *map(len, ids)]).cumsum(0)),
            divergence=divergence,  # type: ignore[arg-type]
            beta=beta,
            chunk_rows=chunk_rows,
        )
        for ids, size in ((recorded, rows), (common, (6, 6)))
    )
    kept = torch.tensor([0, 1, 3, 4])
    assert torch.equal(found[kept], expected[kept])
    assert found[2] == 0
    gradients = [
        torch.autograd.grad(one[kept].sum(), (hidden, head), retain_graph=True) for one in (found, expected)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert gradients[0][1][6:].abs().max() == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(found[2], (hidden, head)))


def test_a_student_like_its_teacher_is_at_no_distance_and_stays() -> None:
    hidden, head = torch.randn(T, D).requires_grad_(), torch.randn(V, D)
    for divergence in ("reverse", "forward", "jsd"):
        found = divergences(hidden, head, Said(hidden.detach(), head), divergence=divergence)
        assert torch.equal(found, torch.zeros(T))
        (gradient,) = torch.autograd.grad(found.sum(), hidden)
        assert torch.equal(gradient, torch.zeros(T, D))
