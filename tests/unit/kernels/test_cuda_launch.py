"""What is told to the driver and to the compiler, as far as no device is needed."""

from __future__ import annotations

import ctypes

import pytest

from headrace.kernels import cuda, hopper_decode, hopper_product


def test_structures_have_the_driver_s_sizes():
    assert ctypes.sizeof(cuda.TensorMap) == 128
    assert ctypes.sizeof(hopper_decode.Maps) == 4 * 128
    assert ctypes.sizeof(cuda._Attribute) == 72
    assert cuda._Attribute.value.offset == 8
    assert (ctypes.sizeof(cuda._Launch), cuda._Launch.stream.offset) == (56, 32)


@pytest.mark.parametrize(
    "tile", [tile for some in (*hopper_product.TILES, *hopper_product.PART_TILES) for tile in some]
)
def test_tiles_fit_a_multiprocessor(tile):
    """227 KiB of shared memory with the barriers, 65,536 registers of which consumers take 240 a thread."""
    assert tile.shared_bytes + 2 * 8 * tile.stages <= 227 * 1024
    assert 128 * (tile.consumers * 240 + 24) <= 65_536
    assert tile.subtiles * tile.columns // 2 <= 192
    assert tile.columns % 32 == 0


def test_parts_make_about_as_many_blocks_as_there_are_multiprocessors():
    assert list(hopper_product.cuts(256, 4096, 132)) == [(hopper_product.Tile(2, 2, 128, 4), 4)]
    assert [(tile.columns, parts) for tile, parts in hopper_product.cuts(64, 5120, 132)] == [(128, 3), (160, 4)]
    assert not list(hopper_product.cuts(64, 1024, 132))
    assert not list(hopper_product.cuts(256, 151_936, 132))


def test_the_product_s_instruction_names_every_sum_once():
    for tile in hopper_product.TILES[0]:
        text = hopper_product.source(tile)
        assert "// MULTIPLY" not in text
        assert text.count('"+f"(sums[') == tile.columns // 2
        assert f"m64n{tile.columns}k16" in text


def test_a_source_begins_with_what_it_asks_of_the_device():
    for file in ("hopper_decode.cu", "hopper_product.cu"):
        text = cuda.source_of(file)
        assert text.startswith("// What the kernels for Hopper ask of the device.")
        assert 'extern "C" __global__' in text
