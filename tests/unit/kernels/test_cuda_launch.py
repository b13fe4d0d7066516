"""What is told to the driver and to the compiler, as far as no device is needed."""

from __future__ import annotations

import ctypes

import pytest

from headrace.kernels import cuda, hopper_decode, hopper_gate


def test_structures_have_the_driver_s_sizes():
    assert ctypes.sizeof(cuda.TensorMap) == 128
    assert ctypes.sizeof(hopper_decode.Maps) == 4 * 128
    assert ctypes.sizeof(cuda._Attribute) == 72
    assert cuda._Attribute.value.offset == 8
    assert (ctypes.sizeof(cuda._Launch), cuda._Launch.stream.offset) == (56, 32)


@pytest.mark.parametrize("tile", [tile for some in hopper_gate.TILES for tile in some])
def test_tiles_fit_a_multiprocessor(tile):
    """227 KiB of shared memory with the barriers, 65,536 registers of which consumers take 240 a thread."""
    assert tile.shared_bytes + 2 * 8 * tile.stages <= 227 * 1024
    assert 128 * (tile.consumers * 240 + 24) <= 65_536
    assert tile.subtiles * tile.columns // 2 <= 192
    assert tile.columns % 64 == 0


def test_the_product_s_instruction_names_every_sum_once():
    for tile in hopper_gate.TILES[0]:
        text = hopper_gate.source(tile)
        assert "// MULTIPLY" not in text
        assert text.count('"+f"(sums[') == tile.columns // 2
        assert f"m64n{tile.columns}k16" in text


def test_a_source_begins_with_what_it_asks_of_the_device():
    for file in ("hopper_decode.cu", "hopper_gate.cu"):
        text = cuda.source_of(file)
        assert text.startswith("// What the kernels for Hopper ask of the device.")
        assert 'extern "C" __global__' in text
