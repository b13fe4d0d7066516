from __future__ import annotations

import pytest
import torch

from headrace.kernels import cast
from headrace.kernels.cast import Casts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [0, 1, 7, 8, 4095, 4096, 4097, cast.PIECE - 1, cast.PIECE, cast.PIECE + 13]


def draw(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        # The interpreter truncates where it should round: numbers that every kind has exactly.
        return torch.randint(-128, 129, (size,), generator=generator).to(dtype).to(DEVICE)
    return torch.randint(0, 127, (size,), generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("place", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_copied_to_its_place_and_nothing_beyond(kind: torch.dtype, place: torch.dtype) -> None:
    sources = [draw(size, kind, seed) for seed, size in enumerate(SIZES)]
    block = torch.full((sum(SIZES) + 8 * len(SIZES),), 0.5, dtype=place, device=DEVICE)
    places, start = [], 0
    for size in SIZES:
        places.append(block[start : start + size])
        start += size + 8
    expected, start = block.clone(), 0
    for source in sources:
        expected[start : start + len(source)].copy_(source)
        start += len(source) + 8
    casts = Casts(sources, places)
    for _ in range(2):
        block.fill_(0.5)
        casts.run()
        assert torch.equal(block, expected)


def test_pairs_of_several_kinds_go_together() -> None:
    kinds = [torch.int64, torch.bool, torch.float32, torch.uint8, torch.bfloat16, torch.float8_e4m3fn]
    sources = [draw(300, kind) for kind in kinds]
    places = [torch.zeros_like(source) for source in sources]
    places[2] = torch.zeros(300, dtype=torch.bfloat16, device=DEVICE)
    Casts(sources, places).run()
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(place.float(), source.float())


def test_what_is_in_the_tensors_now_counts() -> None:
    source, place = draw(100, torch.float32), torch.zeros(100, device=DEVICE)
    casts = Casts([source], [place])
    source.fill_(3.0)
    casts.run()
    assert torch.equal(place, source)


def test_which_pairs_are_possible() -> None:
    matrix = torch.zeros(8, 4, device=DEVICE)
    assert Casts.possible(matrix, matrix.clone().view(-1).bfloat16())
    assert not Casts.possible(matrix.T, matrix.clone())
    assert not Casts.possible(matrix, matrix[1:])
    assert not Casts.possible(matrix.long(), matrix)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter truncates")
def test_rounding_is_that_of_copies() -> None:
    source = torch.randn(1_000_003, device=DEVICE)
    source[:4] = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])
    for kind in (torch.bfloat16, torch.float16):
        place = torch.empty(source.shape, dtype=kind, device=DEVICE)
        Casts([source], [place]).run()
        assert torch.equal(place.view(torch.int16), source.to(kind).view(torch.int16))
