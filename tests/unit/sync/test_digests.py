"""Digests of tensors on the CPU, against the definition applied with the xxhash library."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash

from headrace.sync import digest as module
from headrace.sync.digest import BLOCK, PIECE, digests

SIZES = [0, 1, 63, 64, 1023, 1024, 1025, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 5 * 2**20 + 12345]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.complex128,
]


def definition(raw: bytes) -> int:
    words = b""
    for start in range(0, len(raw), PIECE):
        piece = raw[start : start + PIECE]
        while len(piece) % BLOCK:
            piece += b"\0"
        words += xxhash.xxh3_64_intdigest(piece).to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(words + len(raw).to_bytes(8, "little"))


def draw(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def digest(raw: np.ndarray) -> int:
    return digests([torch.from_numpy(raw)])[0]


def test_digests_follow_the_definition_at_every_size() -> None:
    raw = [draw(size, seed) for seed, size in enumerate(SIZES)]
    assert digests([torch.from_numpy(one) for one in raw]) == [definition(one.tobytes()) for one in raw]


def test_digests_are_these_numbers_for_good() -> None:
    assert digests([]) == []
    assert digests([torch.empty(0), torch.tensor(1.0), torch.arange(40_000)]) == [
        0xC77B3ABB6F87ACD9,
        0xDA767661FED0714B,
        0xF5D2056CB647001C,
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_that_of_the_bytes_whatever_their_dtype_and_shape(dtype: torch.dtype) -> None:
    raw = draw(6 * 7 * 16 * 500) % 2
    tensor = torch.from_numpy(raw).view(dtype).view(6, 7, -1)
    scalar = tensor[0, 0, 0]
    expected = [definition(raw.tobytes()), definition(raw[: dtype.itemsize].tobytes())]
    assert digests([tensor, scalar]) == expected
    assert digests([tensor.view(-1), scalar]) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_that_is_not_contiguous_has_the_digest_of_its_contiguous_copy(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(draw(6 * 7 * 16 * 50) % 2).view(dtype).view(6, 7, -1)
    views = [tensor.transpose(0, 2), tensor[:, 2:5], tensor[::2], tensor[0, 0].expand(3, -1)]
    assert not any(view.is_contiguous() for view in views)
    assert digests(views) == digests([view.contiguous() for view in views])


def test_parameters_that_train_have_digests() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 5))
    assert digests([weight, weight.T]) == digests([torch.ones(3, 5), torch.ones(5, 3)])


def test_every_flipped_bit_changes_the_digest() -> None:
    raw = draw(1100)
    seen = {digest(raw)}
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        seen.add(digest(raw))
        raw[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(raw)


def test_a_flipped_bit_anywhere_in_many_pieces_changes_the_digest() -> None:
    raw = draw(3 * PIECE + 5)
    before = digest(raw)
    places = np.random.default_rng(1).integers(0, len(raw), 200)
    for place in [0, PIECE - 1, PIECE, len(raw) - 1, *places]:
        raw[place] ^= 0x10
        assert digest(raw) != before, place
        raw[place] ^= 0x10
    assert digest(raw) == before


def test_exchanged_neighbouring_words_change_the_digest() -> None:
    raw = draw(4096)
    before = digest(raw)
    for width in (2, 4, 8, 64, 1024):
        for at in range(0, len(raw) - width, width):
            exchanged = raw.copy()
            exchanged[at : at + width] = raw[at + width : at + 2 * width]
            exchanged[at + width : at + 2 * width] = raw[at : at + width]
            assert digest(exchanged) != before, (width, at)


def test_exchanged_pieces_change_the_digest() -> None:
    pieces = draw(4 * PIECE).reshape(4, PIECE)
    orders = [[0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0]]
    assert len({digest(pieces[order].reshape(-1)) for order in orders}) == len(orders)


def test_zeros_at_the_end_count() -> None:
    sizes = [0, 1, 1023, 1024, 1025, 2048, PIECE, PIECE + 1, PIECE + 1024, 2 * PIECE]
    assert len({digest(np.zeros(size, np.uint8)) for size in sizes}) == len(sizes)


def test_threads_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.from_numpy(draw(size, size)) for size in SIZES]
    expected = digests(tensors)
    monkeypatch.setattr(module, "_PARALLEL_BYTES", 1)
    monkeypatch.setattr(module, "_SPAN", PIECE)
    assert digests(tensors) == expected


def test_bytes_that_are_copied_from_a_device_without_a_kernel_have_the_same_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SPAN", PIECE)
    tensors = [torch.from_numpy(draw(size, size)) for size in SIZES]
    tensors += [torch.ones(70, 900, dtype=torch.bfloat16).T, torch.tensor(3.0)]
    words = module.Words([tensor.nbytes for tensor in tensors])
    found = words.digests(module._through_the_cpu(tensors))
    assert found == digests(tensors)


def test_a_contiguous_tensors_bytes_are_not_copied() -> None:
    tensor = torch.zeros(4)
    view = module._bytes_of(tensor)
    tensor.fill_(1.0)
    assert bytes(view) == bytes.fromhex("0000803f" * 4)


def test_the_rooms_face_loads_neither_torch_nor_triton() -> None:
    code = "import sys, headrace.sync, headrace.sync.digest; print({'torch', 'triton'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
