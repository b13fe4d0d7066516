"""Digests on the device are those of the CPU, and take about as long as reading the bytes."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
import torch

from headrace.kernels.digest import piece_digests
from headrace.sync.digest import PIECE, digests

pytestmark = pytest.mark.gpu

FOUR_GIB = 4 * 2**30


def draw(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8, device="cuda")


def on_the_cpu(tensors: list[torch.Tensor]) -> list[int]:
    return digests([tensor.cpu() for tensor in tensors])


def test_sizes_of_all_kinds_in_one_launch():
    dice = np.random.default_rng(0)
    sizes = [0, 1, 63, 64, 1023, 1024, 1025, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE]
    sizes += dice.integers(0, 3000, 300).tolist() + dice.integers(0, 40 * PIECE, 60).tolist()
    tensors = [draw(size, seed) for seed, size in enumerate(sizes)]
    assert digests(tensors) == on_the_cpu(tensors)


def test_dtypes_strides_and_alignments():
    raw = draw(1 << 20)
    tensors = [raw[shift:] for shift in (1, 2, 4, 8, 16)]
    tensors += [raw.view(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn)]
    tensors += [raw.view(torch.bfloat16).view(512, 1024).T, raw.view(1024, 1024)[:, 3:700], raw[5].clone()]
    assert digests(tensors) == on_the_cpu(tensors)


def test_tensors_of_both_devices_keep_their_order():
    tensors = [draw(size, size) for size in (5000, 3 * PIECE, 0, 77)]
    mixed = [tensor.cpu() if place % 2 else tensor for place, tensor in enumerate(tensors)]
    assert digests(mixed) == on_the_cpu(tensors)


def test_a_flipped_bit_changes_the_digest():
    tensor = draw(3 * PIECE + 5)
    before = digests([tensor])
    for place in (0, 7, PIECE - 1, PIECE, 3 * PIECE + 4):
        tensor[place] ^= 1
        assert digests([tensor]) != before
        tensor[place] ^= 1
    assert digests([tensor]) == before


def test_it_follows_what_the_current_stream_wrote():
    target, source = torch.zeros(256 * PIECE, dtype=torch.uint8, device="cuda"), draw(256 * PIECE)
    expected = on_the_cpu([source])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        target.copy_(source)
        assert digests([target]) == expected


def test_without_triton_bytes_go_through_the_cpu(monkeypatch):
    tensors = [draw(70 * PIECE + 1), draw(2000).view(40, 50).T, draw(0)]
    expected = digests(tensors)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert digests(tensors) == expected


def test_four_gibibytes_take_no_longer_than_a_copy_of_them():
    whole = draw(FOUR_GIB)
    tensors = list(whole.view(torch.bfloat16).split(8 * 922_457))
    copy = torch.empty_like(whole)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def seconds(act) -> float:
        taken = []
        for _ in range(8):
            torch.cuda.synchronize()
            # So that the host is ahead and its work is not in the time.
            torch.cuda._sleep(20_000_000)
            begin.record()
            act()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000)
        return min(taken[2:])

    digest_s, copy_s = seconds(lambda: piece_digests(tensors)), seconds(lambda: copy.copy_(whole))
    began = time.perf_counter()
    digests(tensors)
    wall_s = time.perf_counter() - began
    read, moved = FOUR_GIB / digest_s / 1e9, 2 * FOUR_GIB / copy_s / 1e9
    print(
        f"\n4 GiB in {len(tensors)} tensors: digests {digest_s * 1e3:.2f} ms, {read:.0f} GB/s read"
        f" (with the host {wall_s * 1e3:.2f} ms); copy {copy_s * 1e3:.2f} ms, {moved:.0f} GB/s read and written"
    )
    assert digest_s < copy_s
