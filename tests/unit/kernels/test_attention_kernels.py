"""Attention over pages and packed rows, against a plain computation token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.kernels import attention as A
from headrace.kernels import decode as D
from interpreted import attention_apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


class Case:
    """Sequences of random lengths in scattered pages."""

    def __init__(self, seed, *, lengths, heads, groups, dim, page, dtype):
        dice = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.lengths = np.array(lengths)
        pages_each = -(-self.lengths // page)
        total = int(pages_each.sum()) + 3
        order = dice.permutation(total)
        self.table = np.zeros((len(lengths) + 2, int(pages_each.max()) + 1), np.int32)
        self.places = dice.permutation(len(lengths) + 2)[: len(lengths)]
        used = 0
        for place, count in zip(self.places, pages_each, strict=True):
            self.table[place, :count] = order[used : used + count]
            used += count
        self.keys = torch.randn(groups, total, page, dim, device=DEVICE, dtype=dtype)
        self.values = torch.randn(groups, total, page, dim, device=DEVICE, dtype=dtype)
        self.device_table = torch.from_numpy(self.table).to(DEVICE)
        self.heads, self.dim, self.dtype = heads, dim, dtype

    def queries(self, tokens):
        return torch.randn(tokens, self.heads, self.dim, device=DEVICE, dtype=self.dtype)

    def expected(self, q, places, positions):
        return A.attend_reference(
            q, self.keys, self.values, self.device_table, torch.as_tensor(places), torch.as_tensor(positions)
        )

    def decode(self, q, extra, tile=A.DECODE):
        items, merges = A.decode_items(self.lengths, self.places, extra, tile.keys)
        return self.run(q, items, tile, merges)

    def decode_single(self, q, extra):
        keys = D.tile_keys(self.keys.shape[2])
        items, merges = A.decode_items(self.lengths, self.places, extra, keys)
        return self.run(q, items, None, merges)

    def run(self, q, items, tile, merges=None):
        out = torch.full_like(q, float("nan"))
        partial = torch.full((len(items), self.heads, self.dim), float("nan"), device=DEVICE)
        statistics = torch.full((len(items), self.heads, 2), float("nan"), device=DEVICE)
        cache = A.Cache.paged(self.keys, self.values)
        items = torch.from_numpy(items).to(DEVICE)
        if tile is None:
            D.attend_single(q, cache, self.device_table, items, out, partial, statistics)
        else:
            A.attend(q, cache, self.device_table, items, out, tile, partial, statistics)
        if merges is not None:
            A.merge(torch.from_numpy(merges).to(DEVICE), partial, statistics, out)
        return out


def close(a, b):
    # A weight times a value is rounded to the inputs' type before it is summed.
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[a.dtype]
    assert not torch.isnan(a).any()
    assert (a - b).abs().max() <= limit


SHAPES = [(8, 2, 32, 16), (4, 4, 16, 4), (7, 1, 64, 64), (10, 2, 80, 8), (32, 8, 128, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("tile", [A.DECODE, A.DECODE_MANY])
def test_one_query_per_sequence_over_pages(shape, extra, tile, dtype):
    heads, groups, dim, page = shape
    case = Case(1, lengths=[1, 63, 64, 65, 700, 3], heads=heads, groups=groups, dim=dim, page=page, dtype=dtype)
    q = case.queries(6)
    close(case.decode(q, extra, tile), case.expected(q, case.places, case.lengths - 1))


HALF = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "shape", [(8, 2, 32, 16), (16, 1, 64, 64), (10, 2, 80, 32), (32, 8, 128, 64), (2, 2, 16, 128)]
)
@pytest.mark.parametrize("extra", [0, 5])
def test_the_kernel_for_single_queries_over_pages(shape, extra, dtype):
    heads, groups, dim, page = shape
    lengths = [1, 16, 63, 64, 65, 700, 1003]
    case = Case(1, lengths=lengths, heads=heads, groups=groups, dim=dim, page=page, dtype=dtype)
    q = case.queries(len(lengths))
    close(case.decode_single(q, extra), case.expected(q, case.places, case.lengths - 1))


def test_what_lies_behind_a_sequence_s_end_is_not_seen_even_if_it_is_no_number():
    case = Case(4, lengths=[5, 70, 131], heads=4, groups=2, dim=32, page=64, dtype=torch.float16)
    q = case.queries(3)
    expected = case.expected(q, case.places, case.lengths - 1)
    for length, place in zip(case.lengths, case.places, strict=True):
        last = int(case.table[place, (length - 1) // 64])
        for cache in (case.keys, case.values):
            cache[:, last, (length - 1) % 64 + 1 :] = float("nan")
    close(case.decode_single(q, 0), expected)


def test_which_caches_the_kernel_for_single_queries_serves():
    assert [D.tile_keys(page) for page in (8, 16, 24, 32, 64, 96, 128)] == [0, 16, 0, 32, 64, 0, 64]
    wide, narrow = (torch.empty(2, 3, 16, dim, dtype=torch.float16, device=DEVICE) for dim in (64, 36))
    assert D.serves(torch.empty(1, 2, 64, dtype=torch.float16, device=DEVICE), A.Cache.paged(wide, wide))
    assert not D.serves(torch.empty(1, 2, 36, dtype=torch.float16, device=DEVICE), A.Cache.paged(narrow, narrow))
    assert not D.serves(torch.empty(1, 2, 64, device=DEVICE), A.Cache.paged(wide.float(), wide.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", [A.CHUNK, A.INVARIANT])
def test_chunks_of_queries_see_what_is_cached_and_themselves(shape, tile, dtype):
    heads, groups, dim, page = shape
    case = Case(2, lengths=[40, 9, 130], heads=heads, groups=groups, dim=dim, page=page, dtype=dtype)
    counts = np.array([40, 1, 70])
    tokens, positions = np.array([0, 40, 41]), case.lengths - counts
    items = A.chunk_items(tokens, counts, positions, case.places, tile.rows // (heads // groups))
    q = case.queries(111)
    places_t = np.repeat(case.places, counts)
    positions_t = np.concatenate([np.arange(p, p + c) for p, c in zip(positions, counts, strict=True)])
    close(case.run(q, items, tile), case.expected(q, places_t, positions_t))


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_invariant_tile_a_query_gives_the_same_bits_alone_in_a_batch_in_a_chunk_and_packed(
    dtype, same_bits
):
    case = Case(3, lengths=[150, 20, 77], heads=8, groups=2, dim=32, page=16, dtype=dtype)
    q = case.queries(3)
    batch = case.decode(q, 0, A.INVARIANT)
    apart = attention_apart(q, case.keys, case.values, 150)
    for i in range(3):
        alone, _ = A.decode_items(case.lengths[i : i + 1], case.places[i : i + 1], 0)
        same_bits(case.run(q[i : i + 1], alone, A.INVARIANT)[0], batch[i], apart)
    # the last query of a chunk over the whole first sequence, and the same from packed rows
    whole = case.queries(150)
    whole[149] = q[0]
    items = A.chunk_items(np.array([0]), np.array([150]), np.array([0]), case.places[:1], 4)
    same_bits(case.run(whole, items, A.INVARIANT)[149], batch[0], apart)
    pages = case.device_table[int(case.places[0]), :10].long()
    packed = [x[:, pages].flatten(1, 2)[:, :150].transpose(0, 1).contiguous() for x in (case.keys, case.values)]
    items[:, 5] = 0
    out = torch.empty_like(whole)
    A.attend(
        whole, A.Cache.packed(*packed), case.device_table, torch.from_numpy(items).to(DEVICE), out, A.INVARIANT
    )
    same_bits(out[149], batch[0], apart)


def test_items_cover_every_key_once_within_their_budget():
    dice = np.random.default_rng(0)
    for _ in range(200):
        count, extra = int(dice.integers(1, 60)), int(dice.integers(1, 40))
        lengths = dice.integers(1, 10 ** int(dice.integers(1, 6)), count)
        items, merges = A.decode_items(lengths, np.arange(count), extra)
        assert len(items) == count + extra
        used = items[items[:, 1] > 0]
        seen = np.zeros(count, int)
        for token, _, position, first, last, place, part, merge in used:
            assert place == token
            assert position == lengths[token] - 1
            assert first == seen[token] < last
            assert (part >= 0) == (merge >= 0) == (last - first < lengths[token])
            assert part < 0 or merges[merge, 0] == token
            seen[token] = last
        assert (seen == lengths).all()
        order = used[used[:, 3] == 0][:, 0]
        long = lengths[order] > A.LONG * lengths.mean()
        assert (np.diff(lengths[order[long]]) <= 0).all()
        assert (np.diff(order[~long]) > 0).all()
        assert (np.diff(long.astype(int)) <= 0).all()
        joined = merges[merges[:, 2] > 0]
        assert sorted(joined[:, 0]) == [t for t in range(count) if (used[:, 0] == t).sum() > 1]
        for token, first, parts, _ in joined:
            assert (used[used[:, 0] == token][:, 6] == np.arange(first, first + parts)).all()
