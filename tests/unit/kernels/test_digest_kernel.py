from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from headrace.kernels import digest as kernel
from headrace.kernels.digest import piece_digests, plan
from headrace.sync import digest as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PIECE = reference.PIECE


def draw(size: int, seed: int = 0) -> Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return torch.from_numpy(raw).to(DEVICE)


def expected(*tensors: Tensor) -> list[int]:
    """By the library, piece by piece."""
    found = []
    for tensor in tensors:
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for start in range(0, len(raw), PIECE):
            piece = raw[start : start + PIECE]
            found.append(xxhash.xxh3_64_intdigest(piece.ljust(-(-len(piece) // 1024) * 1024, b"\0")))
    return found


def found(*tensors: Tensor) -> list[int]:
    return piece_digests(tensors).cpu().tolist()


def test_every_piece_of_every_tensor_has_its_xxh3() -> None:
    sizes = [0, 1, 7, 8, 9, 63, 64, 960, 1023, 1024, 1025, 2048, 3071, 4096, 0, PIECE - 1, PIECE + 1]
    tensors = [draw(size, seed) for seed, size in enumerate(sizes)]
    digests = found(*tensors)
    assert len(digests) == len(sizes) - 2 + 1
    assert digests == expected(*tensors)


@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_a_digest_does_not_depend_on_how_many_blocks_are_read_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCKS_AT_ONCE", at_once)
    tensor = draw(21 * 1024 + 777)
    assert found(tensor) == expected(tensor)


def test_tensors_digests_are_those_of_the_cpu() -> None:
    tensors = [draw(5000), draw(0), draw(PIECE + 8, 1)]
    sizes = [tensor.nbytes for tensor in tensors]
    joined = reference.Words(sizes).digests(piece_digests(tensors).cpu().numpy())
    assert joined == reference.digests([tensor.cpu() for tensor in tensors])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
def test_bytes_of_any_dtype_count(dtype: torch.dtype) -> None:
    raw = draw(2072) % 2
    assert found(raw.view(dtype)) == expected(raw)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 16])
def test_tensors_may_begin_anywhere(shift: int) -> None:
    view = draw(3000)[shift:]
    assert view.data_ptr() % 16 == shift % 16
    assert found(view) == expected(view)


def test_tensors_need_not_be_contiguous() -> None:
    tensor = draw(40 * 60).view(40, 60)
    assert found(tensor.T, tensor[:, 8:24]) == expected(tensor.T, tensor[:, 8:24])


@pytest.mark.parametrize("size", [1, 5, 8, 1021, 2050])
def test_what_lies_behind_a_tensor_does_not_count(size: int) -> None:
    zeros, ones = torch.zeros(4096, dtype=torch.uint8, device=DEVICE), draw(4096)
    zeros[:size] = ones[:size]
    assert found(zeros[:size]) == found(ones[:size]) == expected(ones[:size])


def test_extreme_words_are_multiplied_in_full() -> None:
    for word in (-1, 2**63 - 1, -(2**63), 0xFFFFFFFF, 1):
        tensor = torch.full((400,), word, device=DEVICE)
        assert found(tensor) == expected(tensor)


def test_the_plan_cuts_tensors_into_pieces() -> None:
    table = plan([1000, 5000, 2000, 2**47], [PIECE + 3, 0, 1, 2 * PIECE])
    assert table.tolist() == [
        [1000, PIECE],
        [1000 + PIECE, 3],
        [2000, 1],
        [2**47, PIECE],
        [2**47 + PIECE, PIECE],
    ]
    assert plan([64], [0]).shape == (0, 2)


def test_no_pieces_are_no_digests() -> None:
    assert found(draw(0), draw(0)) == []


def test_a_piece_is_the_reference_s() -> None:
    assert kernel.PIECE == reference.PIECE


def test_what_is_copied_on_the_way_is_the_bytes_and_has_their_digests() -> None:
    sizes = [0, 1, 7, 8, 9, 63, 64, 1023, 1024, 1025, 2048, 3071, 4099, PIECE - 1, PIECE, PIECE + 13]
    sources = [draw(size, seed) for seed, size in enumerate(sizes)]
    block = torch.full((sum(-(-size // 16) * 16 + 16 for size in sizes),), 0xA5, dtype=torch.uint8, device=DEVICE)
    targets, start = [], 0
    for size in sizes:
        targets.append(block[start : start + size])
        start += -(-size // 16) * 16 + 16
    found = kernel.Pieces(sources, targets).digests().cpu().tolist()
    assert found == piece_digests(sources).cpu().tolist()
    start = 0
    for size, source in zip(sizes, sources, strict=True):
        assert torch.equal(block[start : start + size], source)
        after = block[start + size : start + -(-size // 16) * 16 + 16]
        assert bool((after == 0xA5).all()), "not a byte beyond"
        start += -(-size // 16) * 16 + 16


def test_a_target_that_is_not_aligned_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        kernel.Pieces([draw(64)], [torch.zeros(80, dtype=torch.uint8, device=DEVICE)[1:65]])
