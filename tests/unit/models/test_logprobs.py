"""token_logprobs against a float64 reference that loops over rows and is differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.models.logprobs import Support, token_logprobs
from headrace.models.ops import ReferenceOps

ROWS, HIDDEN, VOCAB = 11, 6, 23


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return hidden, head, targets


def ragged_support(targets: torch.Tensor) -> Support:
    """Row t may sample t % 5 ids, its target among them; rows 0, 5 and 10 are not truncated."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row, target in enumerate(targets.tolist()):
        others = [i for i in torch.randperm(VOCAB, generator=generator).tolist() if i != target]
        rows.append(([*others[: row % 5 - 1], target]) if row % 5 else [])
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Support(torch.tensor([i for row in rows for i in row], dtype=torch.int32), offsets)


def row_by_row(hidden, head, targets, temperature, support):
    logprobs, entropies = [], []
    for row in range(len(targets)):
        divisor = temperature[row] if isinstance(temperature, torch.Tensor) else temperature
        logits = head @ hidden[row] / divisor
        allowed = list(range(VOCAB))
        if support is not None and support.offsets[row] < support.offsets[row + 1]:
            allowed = support.ids[support.offsets[row] : support.offsets[row + 1]].tolist()
        logp = logits[allowed] - torch.logsumexp(logits[allowed], 0)
        logprobs.append(logp[allowed.index(targets[row].item())])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk_rows", [None, 1, 4, ROWS])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5, "per row"])
def test_values_and_gradients_equal_the_row_by_row_float64_reference(inputs, temperature, truncated, chunk_rows):
    hidden, head, targets = inputs
    if temperature == "per row":
        temperature = torch.linspace(0.4, 1.7, ROWS)
    support = ragged_support(targets) if truncated else None
    generator = torch.Generator().manual_seed(2)
    by_logprob, by_entropy = torch.randn(2, ROWS, generator=generator)

    exact_hidden, exact_head = (x.double().requires_grad_() for x in (hidden, head))
    exact_temperature = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
    expected = row_by_row(exact_hidden, exact_head, targets, exact_temperature, support)
    (by_logprob.double() @ expected[0] + by_entropy.double() @ expected[1]).backward()

    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    found = token_logprobs(hidden, head, targets, temperature, support, chunk_rows=chunk_rows)
    (by_logprob @ found[0] + by_entropy @ found[1]).backward()

    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, atol=5e-5, rtol=1e-4)
    torch.testing.assert_close(head.grad.double(), exact_head.grad, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("output", [0, 1])
def test_either_output_alone_can_be_differentiated(inputs, output):
    hidden, head, targets = inputs
    exact = hidden.double().requires_grad_()
    row_by_row(exact, head.double(), targets, 1.0, None)[output].sum().backward()
    hidden = hidden.requires_grad_()
    token_logprobs(hidden, head, targets, chunk_rows=3)[output].sum().backward()
    assert head.grad is None
    torch.testing.assert_close(hidden.grad.double(), exact.grad, atol=2e-5, rtol=1e-4)


def test_a_uniform_distribution_has_the_log_of_its_support_as_entropy():
    hidden, head = torch.zeros(3, HIDDEN), torch.randn(VOCAB, HIDDEN)
    support = Support(torch.tensor([4, 9, 4, 5, 6, 7]), torch.tensor([0, 2, 2, 6]))
    logprobs, entropies = token_logprobs(hidden, head, torch.tensor([9, 9, 4]), 0.7, support)
    expected = torch.tensor([math.log(2), math.log(VOCAB), math.log(4)])
    torch.testing.assert_close(entropies, expected)
    torch.testing.assert_close(logprobs, -expected)


def test_a_support_of_one_id_is_certain():
    support = Support(torch.tensor([4]), torch.tensor([0, 1]))
    logprobs, entropies = token_logprobs(
        torch.randn(1, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.tensor([4]), 1.0, support
    )
    assert logprobs.item() == 0.0
    assert entropies.item() == 0.0


def test_a_target_outside_its_support_has_probability_zero_and_no_gradient():
    hidden = torch.randn(1, HIDDEN).requires_grad_()
    support = Support(torch.tensor([4]), torch.tensor([0, 1]))
    logprobs, _ = token_logprobs(hidden, torch.randn(VOCAB, HIDDEN), torch.tensor([5]), 1.0, support)
    assert logprobs.exp().item() == 0.0
    assert torch.isfinite(logprobs).all()
    logprobs.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(1, HIDDEN))


def test_bfloat16_inputs_give_the_float32_softmax_of_the_bfloat16_logits(inputs):
    hidden, head, targets = (x.bfloat16() if x.is_floating_point() else x for x in inputs)
    logits = (hidden @ head.T).float() / 0.7
    found, entropy = token_logprobs(hidden, head, targets, 0.7, chunk_rows=4)
    assert (found.dtype, entropy.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])


def test_logits_of_more_than_one_chunk_never_exist_at_once(inputs, monkeypatch):
    hidden, head, targets = inputs
    sizes = []
    plain = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: sizes.append(len(x)) or plain(x, w, b))
    hidden = hidden.requires_grad_()
    token_logprobs(hidden, head, targets, chunk_rows=4)[0].sum().backward()
    assert sizes == [4, 4, 3, 4, 4, 3]
    sizes.clear()
    token_logprobs(hidden, head, targets)[0].sum().backward()
    assert sizes == [ROWS]  # one chunk is kept, not computed again


def test_no_tokens_give_no_values():
    logprobs, entropies = token_logprobs(
        torch.zeros(0, HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.zeros(0, dtype=torch.long)
    )
    assert logprobs.shape == entropies.shape == (0,)


def test_a_temperature_of_zero_is_refused(inputs):
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_logprobs(*inputs, 0.0)


def test_the_reference_back_end_computes_the_same(inputs):
    expected = token_logprobs(*inputs, 0.5, chunk_rows=2)
    found = ReferenceOps().token_logprobs(*inputs, 0.5, chunk_rows=2)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
