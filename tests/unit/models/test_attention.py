from __future__ import annotations

import math

import pytest
import torch

from headrace.models.attention import MAX_PADDING, CachedContext, PackedContext, group_by_length


def attend_by_hand(q, k, v):
    """One sequence, head by head, in float64: softmax over the keys up to and including the token's own."""
    length, heads, dim = q.shape
    out = torch.empty(length, heads, dim, dtype=torch.float64)
    for head in range(heads):
        group = head // (heads // k.shape[1])
        for t in range(length):
            scores = k[: t + 1, group].double() @ q[t, head].double() / math.sqrt(dim)
            out[t, head] = scores.softmax(0) @ v[: t + 1, group].double()
    return out


def random_qkv(tokens, heads=4, kv_heads=2, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [9], [4, 4, 4], [1, 12, 3, 11, 2, 12, 7], [10, 9, 10]])
def test_each_packed_sequence_attends_causally_to_itself_alone(lengths, kv_heads):
    q, k, v = random_qkv(sum(lengths), kv_heads=kv_heads)
    found = PackedContext(lengths).attend(0, q, k, v)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    expected = torch.cat([attend_by_hand(*part) for part in parts])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_positions_restart_with_every_sequence():
    context = PackedContext([3, 1, 2])
    assert context.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert context.num_tokens == 6


def test_a_token_gets_no_gradient_from_other_sequences_or_from_padding():
    lengths = [20, 19, 3]
    q, k, v = (x.requires_grad_() for x in random_qkv(sum(lengths)))
    PackedContext(lengths).attend(0, q, k, v)[20:39].square().sum().backward()
    for x in (q, k, v):
        assert torch.equal(x.grad[:20], torch.zeros_like(x.grad[:20]))
        assert torch.equal(x.grad[39:], torch.zeros_like(x.grad[39:]))
        assert x.grad[20:39].abs().sum() > 0


def test_groups_hold_every_sequence_once_and_little_padding():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 60, (256,), generator=generator).tolist()
    groups = group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(256))
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert padded <= (1 + MAX_PADDING) * sum(lengths[i] for i in group)
    assert len(groups) < 12


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_a_batch_without_tokens_is_refused(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        PackedContext(lengths)


@pytest.mark.parametrize("pieces", [[7], [1, 1, 1, 1], [3, 1, 5], [2, 6]])
def test_a_cached_sequence_attends_to_all_that_came_before(pieces):
    q, k, v = random_qkv(sum(pieces))
    context = CachedContext(num_layers=2)
    found = []
    for parts in zip(*(x.split(pieces) for x in (q, k, v)), strict=True):
        context.attend(0, *parts)
        found.append(context.attend(1, *parts))
    torch.testing.assert_close(torch.cat(found).double(), attend_by_hand(q, k, v), atol=1e-5, rtol=0)


def test_a_cached_sequence_has_grown_only_when_its_last_layer_has_seen_the_tokens():
    q, k, v = random_qkv(5)
    context = CachedContext(num_layers=2)
    assert context.length == 0
    context.attend(0, q, k, v)
    assert context.length == 0
    context.attend(1, q, k, v)
    assert context.length == 5
