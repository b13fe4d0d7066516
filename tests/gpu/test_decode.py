"""Attention of single queries by the kernel for Hopper, against a plain computation and under a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_attention_kernels import Case
from test_attention_kernels import close as close_anywhere
from test_rotate import assert_same, projected, rotation_of

from headrace.kernels import attention as A
from headrace.kernels import hopper_decode as H
from headrace.kernels.rotate import rotate_and_write
from headrace.models import Rotation

pytestmark = pytest.mark.gpu

SHAPES = [(32, 8, 128, 64), (16, 8, 128, 64), (8, 1, 128, 128), (7, 1, 64, 64), (2, 2, 64, 192), (40, 8, 128, 64)]

NOTHING = torch.empty(0, A.MERGE, dtype=torch.int32)


def attend(case: Case, q: torch.Tensor, extra: int, counters: torch.Tensor) -> torch.Tensor:
    items, merges = A.decode_items(case.lengths, case.places, extra, H.KEYS)
    out = torch.full_like(q, float("nan"))
    partial = torch.full((len(items), case.heads, case.dim), float("nan"), device="cuda")
    statistics = torch.full((len(items), case.heads, 2), float("nan"), device="cuda")
    cache = A.Cache.paged(case.keys, case.values)
    assert H.serves(q, cache)
    device_items, device_merges = (torch.from_numpy(one).cuda() for one in (items, merges))
    # Items are read before the kernel before it has ended.
    torch.cuda.synchronize()
    work = device_items, device_merges
    H.attend_single(q, cache, case.device_table, *work, out, counters, partial, statistics)
    return out


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Also for long sequences, whose means are small: within 2 % of each head's largest number."""
    close_anywhere(found, expected)
    assert ((found - expected).abs() <= 0.02 * expected.abs().amax(-1, keepdim=True) + 1e-6).all()


@pytest.fixture
def counters() -> torch.Tensor:
    return torch.zeros(H.counters_for(64, 8), dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("extra", [0, 5, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_reference_over_pages(shape, extra, counters):
    heads, groups, dim, page = shape
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 700, 1003, 5000]
    case = Case(1, lengths=lengths, heads=heads, groups=groups, dim=dim, page=page, dtype=torch.bfloat16)
    q = case.queries(len(lengths))
    found = attend(case, q, extra, counters)
    close(found, case.expected(q, case.places, case.lengths - 1))
    assert not counters.any()


def test_many_sequences_of_mixed_lengths(counters):
    lengths = np.random.default_rng(0).integers(1, 900, 300)
    case = Case(2, lengths=lengths, heads=32, groups=8, dim=128, page=64, dtype=torch.bfloat16)
    q = case.queries(len(lengths))
    expected = case.expected(q, case.places, case.lengths - 1)
    for _ in range(20):
        close(attend(case, q, 0, counters), expected)


def test_what_lies_behind_the_end_is_not_seen_even_if_it_is_no_number(counters):
    lengths = [5, 16, 40, 49, 60, 70, 131, *np.random.default_rng(1).integers(1, 300, 300)]
    case = Case(4, lengths=lengths, heads=8, groups=2, dim=128, page=64, dtype=torch.bfloat16)
    q = case.queries(len(lengths))
    expected = case.expected(q, case.places, case.lengths - 1)
    for length, place in zip(case.lengths, case.places, strict=True):
        last = int(case.table[place, (length - 1) // 64])
        for cache in (case.keys, case.values):
            cache[:, last, (length - 1) % 64 + 1 :] = float("nan")
    close(attend(case, q, 0, counters), expected)


def test_scores_that_grow_and_shrink_by_orders_along_a_sequence(counters):
    case = Case(5, lengths=[640, 640], heads=8, groups=2, dim=64, page=64, dtype=torch.bfloat16)
    place = case.table[case.places[0]]
    for i, page in enumerate(place[:10]):
        case.keys[:, int(page)] *= 3.0 * i
    for i, page in enumerate(case.table[case.places[1]][:10]):
        case.keys[:, int(page)] *= 3.0 * (9 - i)
    q = case.queries(2)
    close(attend(case, q, 0, counters), case.expected(q, case.places, case.lengths - 1))


def test_items_of_nothing_are_left_out(counters):
    case = Case(6, lengths=[100, 200, 300], heads=8, groups=2, dim=128, page=64, dtype=torch.bfloat16)
    q = case.queries(3)
    items, _ = A.decode_items(case.lengths, case.places, 0, H.KEYS)
    empty = np.zeros((200, A.ITEM), np.int32)
    out = torch.full_like(q, float("nan"))
    items = torch.from_numpy(np.concatenate([items[:2], empty])).cuda()
    torch.cuda.synchronize()
    H.attend_single(q, A.Cache.paged(case.keys, case.values), case.device_table, items, NOTHING, out, counters)
    close(out[:2], case.expected(q, case.places, case.lengths - 1)[:2])
    assert out[2].isnan().all()
    assert not counters.any()


def test_it_sees_what_the_kernel_before_it_writes(counters):
    """In a graph the two overlap: queries and the newest keys are written by the first, the others lie there."""
    case = Case(7, lengths=[257] * 64, heads=16, groups=8, dim=128, page=64, dtype=torch.bfloat16)
    raw, k, v = (torch.empty(64, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 8, 8))
    rows = torch.tensor([int(case.table[place, 4]) * 64 for place in case.places], device="cuda", dtype=torch.int32)
    cos, sin = (torch.full((64, 1, 128), value, device="cuda", dtype=torch.bfloat16) for value in (1.0, 0.0))
    items = torch.from_numpy(A.decode_items(case.lengths, case.places, 0, H.KEYS)[0]).cuda()
    cache, out = A.Cache.paged(case.keys, case.values), torch.empty_like(raw)

    def step() -> None:
        q = rotate_and_write(raw, k, v, Rotation(cos, sin, None, None, 0.0), case.keys, case.values, rows)
        H.attend_single(q, cache, case.device_table, items, NOTHING, out, counters)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        for tensor in (raw, k, v):
            tensor.normal_()
        torch.cuda.synchronize()
        graph.replay()
        close(out, case.expected(raw, case.places, case.lengths - 1))


@pytest.mark.parametrize("extra", [0, 64])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_projections_left_is_normed_turned_written_and_attended_to(shape, normed, extra, counters):
    """In a graph, replayed over new projections; every third token's key is in the cache already."""
    heads, groups, dim, page = shape
    lengths = np.array([1, 2, 16, 17, 63, 64, 65, 66, 128, 129, 700, 5000, *range(300, 560)])
    case = Case(3, lengths=lengths, heads=heads, groups=groups, dim=dim, page=page, dtype=torch.bfloat16)
    tokens, newest = len(lengths), lengths - 1
    rotation = rotation_of(tokens, dim, torch.bfloat16, normed=normed)
    q, k, v = projected(tokens, heads, groups, dim, torch.bfloat16)
    rows = torch.from_numpy(case.table[case.places, newest // page] * page + newest % page).int().cuda()
    rows[2::3] = -1
    items, merges = (torch.from_numpy(one).cuda() for one in A.decode_items(lengths, case.places, extra, H.KEYS))
    partial, statistics = (torch.empty(len(items), heads, width, device="cuda") for width in (dim, 2))
    made, out = H.Projected(k, v, rotation, rows), torch.empty(tokens, heads, dim, device="cuda", dtype=q.dtype)
    caches = [case.keys.clone(), case.values.clone()]
    assert H.serves(q, A.Cache.paged(*caches), made)
    fresh = torch.empty(tokens, (heads + 2 * groups) * dim, device="cuda", dtype=q.dtype)

    def step() -> None:
        q._base.copy_(fresh)
        work = case.device_table, items, merges, out, counters, partial, statistics, made
        H.attend_single(q, A.Cache.paged(*caches), *work)

    fresh.normal_()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(10):
        fresh.normal_()
        out.fill_(float("nan"))
        for cache in caches:
            cache.flatten(1, 2)[:, rows[rows >= 0].long()] = float("nan")
        torch.cuda.synchronize()
        graph.replay()
        turned = rotate_and_write(q, k, v, rotation, case.keys, case.values, rows)
        close(out, case.expected(turned, case.places, newest))
        for cache, right in zip(caches, (case.keys, case.values), strict=True):
            assert_same(cache, right, normed=normed)
    assert not counters.any()


def test_launches_after_each_other_share_the_counters(counters):
    lengths = np.random.default_rng(3).integers(1, 600, 100)
    case = Case(8, lengths=lengths, heads=32, groups=8, dim=128, page=64, dtype=torch.bfloat16)
    q = case.queries(len(lengths))
    items = torch.from_numpy(A.decode_items(case.lengths, case.places, 0, H.KEYS)[0]).cuda()
    cache, outs = A.Cache.paged(case.keys, case.values), [torch.empty_like(q) for _ in range(4)]
    torch.cuda.synchronize()
    H.attend_single(q, cache, case.device_table, items, NOTHING, outs[0], counters)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            H.attend_single(q, cache, case.device_table, items, NOTHING, out, counters)
    expected = case.expected(q, case.places, case.lengths - 1)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            close(out, expected)
    assert not counters.any()


def test_layers_of_split_sequences_share_their_scratch(counters):
    """In a graph, as the engine's do; what one leaves behind the next must not see."""
    lengths = np.array([5000, 3, 700, 9000, 64, 300, 2100])
    cases = [
        Case(9 + i, lengths=lengths, heads=32, groups=8, dim=128, page=64, dtype=torch.bfloat16) for i in range(4)
    ]
    q = cases[0].queries(len(lengths))
    works = [
        [torch.from_numpy(one).cuda() for one in A.decode_items(lengths, case.places, 64, H.KEYS)] for case in cases
    ]
    partial, statistics = (torch.empty(len(works[0][0]), 32, width, device="cuda") for width in (128, 2))
    outs = [torch.empty_like(q) for _ in cases]

    def run() -> None:
        for case, work, out in zip(cases, works, outs, strict=True):
            cache = A.Cache.paged(case.keys, case.values)
            H.attend_single(q, cache, case.device_table, *work, out, counters, partial, statistics)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    expected = [case.expected(q, case.places, lengths - 1) for case in cases]
    for _ in range(20):
        for tensor in (partial, statistics, *outs):
            tensor.fill_(float("nan"))
        graph.replay()
        for out, one in zip(outs, expected, strict=True):
            close(out, one)
    assert not counters.any()


def test_which_caches_it_serves():
    def serves(heads: int, dim: int, page: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        keys = torch.empty(2, 3, page, dim, dtype=dtype, device="cuda")
        return H.serves(torch.empty(1, heads, dim, dtype=dtype, device="cuda"), A.Cache.paged(keys, keys))

    assert serves(4, 64, 64)
    assert serves(16, 128, 192)
    assert not serves(18, 128, 64)
    assert not serves(4, 96, 64)
    assert not serves(4, 64, 32)
    assert not serves(4, 64, 64, torch.float16)
