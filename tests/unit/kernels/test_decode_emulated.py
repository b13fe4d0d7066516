"""The kernel for Hopper where there is none: its text against the reference, on a model of the device.

Threads, copies and launches go on in random order there. Faults that are planted in the text have to be found.
"""

from __future__ import annotations

import re

import emulated_hopper as E
import numpy as np
import pytest
import torch
from test_attention_kernels import DEVICE, Case, close
from test_rotate import assert_same, draw, expected_of, rotation_of

from headrace.kernels import attention as A
from headrace.kernels import hopper_decode as H

if E.COMPILER is None:
    pytest.skip("there is no g++ to compile the kernel's text with", allow_module_level=True)

# Query heads, key heads, size of a head, tokens of a page.
SHAPES = [(2, 2, 64, 64), (5, 1, 64, 192), (16, 2, 64, 128), (8, 2, 128, 64), (8, 1, 128, 128), (4, 2, 128, 192)]
SMALL, LARGE = SHAPES[0], SHAPES[3]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 97, 100, 112, 127, 128, 129]


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> E.Kernels:
    return E.Kernels(tmp_path_factory.mktemp("emulated_hopper"))


def build(seed: int, shape: tuple[int, int, int, int], lengths) -> Case:
    heads, groups, dim, page = shape
    return Case(seed, lengths=lengths, heads=heads, groups=groups, dim=dim, page=page, dtype=torch.bfloat16)


def fill_behind(case: Case, number: float) -> None:
    """All that is no sequence's."""
    page = case.keys.shape[2]
    nobody_s = torch.ones(case.keys.shape[1:3], dtype=torch.bool, device=DEVICE)
    for length, place in zip(case.lengths, case.places, strict=True):
        at = np.arange(length)
        nobody_s[case.table[place, at // page], at % page] = False
    for cache in (case.keys, case.values):
        cache[:, nobody_s] = number


def check(
    kernels: E.Kernels,
    case: Case,
    *,
    extra: int = 0,
    empty: int = 0,
    behind: float = float("nan"),
    change=None,
    normed: bool | None = None,
    **how,
) -> None:
    """That every launch gives the reference's results. `normed`: given for what the projections left."""
    groups, _, page, dim = case.keys.shape
    fill_behind(case, behind)
    q = case.queries(len(case.lengths))
    items, merges = A.decode_items(case.lengths, case.places, extra, H.KEYS)
    items = np.concatenate([items, np.zeros((empty, A.ITEM), np.int32)])
    sizes = dim, case.heads // groups, groups, page
    if normed is None:
        expected = case.expected(q, case.places, case.lengths - 1).cpu()
        kernel = kernels.get(*sizes, change)
        found = E.attend_single(kernel, q, case.keys, case.values, case.table, items, merges, **how)
    else:
        projected, turned, written = project(case, q, normed=normed)
        expected = case.expected(turned, case.places, case.lengths - 1).cpu()
        caches = written[0].clone(), written[1].clone()
        for cache in caches:
            cache.flatten(1, 2)[:, projected.rows_t[projected.rows_t >= 0].long()] = behind
        kernel = kernels.get(*sizes, change, projected=True, norm=normed)
        found = E.attend_single(kernel, q, *caches, case.table, items, merges, projected, **how)
        for cache, right in zip(caches, written, strict=True):
            assert_same(cache.nan_to_num(9.0), right.nan_to_num(9.0), normed=normed)
    for out in found:
        close(out, expected)
        # The mean of many values is small: of what is missing there the largest number tells more.
        assert ((out - expected).abs() <= 2e-2 * expected.abs().amax(-1, keepdim=True)).all()


def project(case: Case, q: torch.Tensor, *, normed: bool) -> tuple[H.Projected, torch.Tensor, list[torch.Tensor]]:
    """(what the projections left beside q, q turned, the caches with the newest keys and values in them).

    Every third token's key and value are there already.
    """
    groups, _, page, dim = case.keys.shape
    tokens, newest = len(case.lengths), case.lengths - 1
    k, v = (draw(tokens, groups, dim, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))
    rotation = rotation_of(tokens, dim, torch.bfloat16, normed=normed)
    turned, key = expected_of(q, k, rotation)
    rows = torch.from_numpy(case.table[case.places, newest // page] * page + newest % page)
    rows[2::3] = -1
    new = rows >= 0
    for cache, one in ((case.keys, key), (case.values, v)):
        cache.flatten(1, 2)[:, rows[new].long()] = one[new].transpose(0, 1)
    return H.Projected(k, v, rotation, rows.int()), turned, [case.keys, case.values]


# What a launch may go through, chosen by a seed: for the kernel as it is, and for one with a planted fault.


def mixed_launches(kernels: E.Kernels, shape, seed: int, change=None, **what) -> None:
    dice = np.random.default_rng(seed)
    case = build(seed, shape, dice.permutation([1, 17, 40, 64, 65, 128, 300, 600]))
    check(
        kernels,
        case,
        extra=int(dice.choice([0, 8])),
        empty=int(dice.choice([0, 3])),
        seed=seed,
        blocks=dice.integers(1, 16, 3).tolist(),
        resident=int(dice.choice([2, 20, 40])),
        change=change,
        **what,
    )


def projected_launches(kernels: E.Kernels, shape, seed: int, change=None) -> None:
    mixed_launches(kernels, shape, seed, change, normed=True)


def split_sequences(kernels: E.Kernels, shape, seed: int, change=None) -> None:
    """Most items are without the newest key."""
    case = build(seed, shape, [700, 515, 300, 257, 1])
    check(kernels, case, extra=8, seed=seed, blocks=[4, 6, 8], resident=40, change=change)


def mostly_nothing(kernels: E.Kernels, shape, seed: int, change=None) -> None:
    """Most blocks find nothing to do."""
    case = build(seed, shape, [300, 1])
    check(kernels, case, empty=30, seed=seed, blocks=[12, 20, 7], resident=40, change=change)


def few_then_many_blocks(kernels: E.Kernels, shape, seed: int, change=None) -> None:
    """The second launch's blocks find room while the first one's run."""
    case = build(seed, shape, [300] * 4)
    check(kernels, case, seed=seed, blocks=[3, 8], resident=40, change=change)


def many_tiles(kernels: E.Kernels, shape, seed: int, change=None) -> None:
    """More than a warp has lanes."""
    check(kernels, build(seed, shape, [2112]), seed=seed, change=change)


def scores_by_orders(kernels: E.Kernels, shape, seed: int, change=None) -> None:
    check(kernels, by_orders(shape), seed=seed, change=change)


def by_orders(shape: tuple[int, int, int, int]) -> Case:
    """Along the first sequence scores grow, along the second they shrink."""
    case = build(5, shape, [640, 640, 64])
    size = case.keys.shape[2]
    for i in range(10):
        rows = slice(64 * i % size, 64 * i % size + 64)
        for place, factor in zip(case.places, (3.0 * i, 3.0 * (9 - i)), strict=False):
            case.keys[:, int(case.table[place, 64 * i // size]), rows] *= factor
    return case


def test_the_model_declares_what_the_device_s_file_declares():
    declared = re.compile(r"(?:template <[^>]*> )?__device__ __forceinline__ ([^{]*?) *\{")
    of_device, of_model = (set(declared.findall(file.read_text())) for file in (E.FOLDER / "hopper.cuh", E.MODEL))
    assert len(of_device) > 15
    assert of_device == of_model


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_reference_over_pages(kernels, shape):
    check(kernels, build(1, shape, LENGTHS), seed=1, blocks=[5])


@pytest.mark.parametrize("extra", [7, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_that_are_split_and_merged(kernels, shape, extra):
    case = build(2, shape, [1, 300, 257, 64, 700, 515])
    check(kernels, case, extra=extra, seed=extra)


@pytest.mark.parametrize("shape", SHAPES)
def test_sequences_of_many_parts(kernels, shape):
    check(kernels, build(8, shape, [1300, 65, 2600]), extra=40, blocks=[5, 9], resident=40)


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("shape", [SMALL, SHAPES[1]])
def test_items_of_more_tiles_than_a_warp_has_lanes(kernels, shape, extra):
    check(kernels, build(3, shape, [4700, 2048, 1] if extra == 0 else [4700, 1]), extra=extra, blocks=[3])


@pytest.mark.parametrize("behind", [float("inf"), -float("inf"), 3e38])
def test_what_lies_behind_the_end_is_not_seen_whatever_it_is(kernels, behind):
    check(kernels, build(4, LARGE, [1, 5, 16, 17, 33, 40, 70, 131]), behind=behind)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("go_through", [mostly_nothing, split_sequences, few_then_many_blocks])
def test_launches_one_after_the_other_share_their_counters(kernels, go_through, seed):
    go_through(kernels, SMALL, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_launches_of_any_size_one_after_the_other(kernels, shape, seed):
    mixed_launches(kernels, shape, seed)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_projections_left_is_normed_turned_written_and_attended_to(kernels, shape, normed):
    check(kernels, build(1, shape, LENGTHS), seed=1, blocks=[5], normed=normed)
    check(kernels, build(2, shape, [1, 300, 257, 64, 700, 515]), extra=64, blocks=[5, 9], normed=normed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_projected_launches_of_any_size_one_after_the_other(kernels, shape, seed):
    projected_launches(kernels, shape, seed)


@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_scores_that_grow_and_shrink_by_orders_along_a_sequence(kernels, shape, extra):
    check(kernels, by_orders(shape), extra=extra)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_one_warp_s_scores_far_above_the_other_s(kernels, shape):
    case = build(6, shape, [64, 64, 40])
    case.keys[:, int(case.table[case.places[0], 0]), :32] *= 200
    case.keys[:, int(case.table[case.places[1], 0]), 32:] *= 200
    check(kernels, case)


TURN = "if (++stage == STAGES) stage = 0, parity ^= 1;"
WAIT, LET = "await_kernel_before();\n    ", "let_next_begin();\n    "
BYTES = "(KEYS / FEW) * count +"
CLEARED = "before_copies();\n                    __syncwarp();"
MEET = "            await_each_other<WARPS * 32>();\n        }\n"
KNOWN = "merge.parts - 1;\n        await_each_other<WARPS * 32>();\n"
# What is planted: a text of the kernel, what takes its place, and which of its occurrences; and what finds it.
FAULTS = {
    "columns are not swizzled": ("((eight % 8 ^ line % 8) << 4)", "(eight % 8 << 4)", 0, mixed_launches),
    "keys behind the end are not masked": ("none = left < MINE &&", "none = false &&", 0, mixed_launches),
    "values behind the end are not cleared": ("if (left < MINE) {", "if (false) {", 0, mixed_launches),
    "values are not cleared for all lanes": (CLEARED, "before_copies();", 0, mixed_launches),
    "no fence between clearing and copies": (CLEARED, "__syncwarp();", 0, mixed_launches),
    "no wait for keys, values and counters": (WAIT + "while", "while", 0, mixed_launches),
    "no wait for the queries": (WAIT + LET, LET, 0, split_sequences),
    "the next launch begins too early": (WAIT + LET, LET + WAIT, 0, few_then_many_blocks),
    "the producer's parity stays": (TURN, "if (++stage == STAGES) stage = 0;", 0, mixed_launches),
    "the consumers' parity stays": (TURN, "if (++stage == STAGES) stage = 0;", 1, mixed_launches),
    "a last tile's bytes are too many": (BYTES, BYTES.replace("count", "(count + 1)"), 0, mixed_launches),
    "a last tile's bytes are too few": (BYTES, BYTES.replace("count", "(count - 1)"), 0, mixed_launches),
    "the counters are left as they are": ("next[0] = next[1] = 0;", ";", 0, mixed_launches),
    "a stage is given back while lanes read": (
        "__syncwarp();\n            if (lane",
        "if (lane",
        0,
        mixed_launches,
    ),
    "pages are found for a tile too many": ("min(32, ", "min(33, ", 0, many_tiles),
    "the total does not fade": ("higher, total[j] *= fade;", "higher;", 0, scores_by_orders),
    "parts are joined before all have come": ("merge.parts - 1;", "merge.parts - 2;", 0, split_sequences),
    "parts that came stay counted": ("*come = 0;", ";", 0, split_sequences),
    "parts are joined before it is known": (KNOWN, KNOWN.split("await")[0], 0, split_sequences),
    "sums are written before all are read": (MEET, "        }\n", 0, mixed_launches),
    "the newest key is read where it lies": (
        "item.last - (newest != END) - shared",
        "item.last - shared",
        0,
        projected_launches,
    ),
    "an opening's bytes are not awaited": ("(begins ? OPENING_BYTES : 0)", "0", 0, projected_launches),
    "both warps begin with the newest key": ("warp == 0 && newest", "newest", 0, projected_launches),
    "every row counts the newest key": ("row == 0 ? 1.0f : 0.0f", "1.0f", 0, projected_launches),
    "a key that is there is made anew": (
        "max(projected.rows[item.token], END)",
        "item.token",
        0,
        projected_launches,
    ),
    "every part has the newest key": ("item.last == item.position + 1", "true", 0, projected_launches),
    "keys go to another head": ("(u64)group * head_rows + newest", "(u64)newest", 0, projected_launches),
    "queries are not turned": ("turn(queries, ", "if (false) turn(queries, ", 0, projected_launches),
    "halves are turned the wrong way": (
        "const u32 with_a = sines[k]",
        "const u32 with_a = sines[k + APART]",
        0,
        projected_launches,
    ),
}
# In the others the sums of all columns are written at once.
OF_LARGE = {"sums are written before all are read"}


def planted(old: str, new: str, which: int):
    def change(text: str) -> str:
        parts = text.split(old)
        assert len(parts) > which + 1, f"the kernel no longer says {old!r}: plant the fault in what it says now"
        return old.join(parts[: which + 1]) + new + old.join(parts[which + 1 :])

    return change


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(kernels, fault):
    *text, go_through = FAULTS[fault]
    shape = LARGE if fault in OF_LARGE else SMALL
    heads, groups, dim, page = shape
    change = planted(*text)
    kernels.get(dim, heads // groups, groups, page, change)

    def find() -> None:
        for seed in range(20):
            go_through(kernels, shape, seed, change)

    with pytest.raises((E.Fault, AssertionError)):
        find()
