"""Blocks of memory on the CPU; tests/gpu/test_sleep.py has the same on CUDA."""

from __future__ import annotations

import ctypes
import gc
from itertools import pairwise

import numpy as np
import psutil
import pytest
import torch
from engine_builders import MODEL

from headrace.engine.native import memory
from headrace.engine.native.kv import KvCache
from headrace.engine.native.memory import PIECE_BYTES, Block
from headrace.engine.native.weights import Weights
from headrace.errors import HeadraceError, SyncError
from headrace.models import joined_names, random_model
from headrace.models.joined import side_by_side
from headrace.sync.layout import ALIGN

CPU = torch.device("cpu")
SIZE = 2**26


def used_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def make_block(size: int = SIZE) -> Block:
    block = Block(size, CPU)
    block.restore()
    return block


def test_a_block_holds_what_is_written_and_as_many_bytes_as_were_asked_for():
    block = make_block(12_345)
    assert block.resident
    assert block.bytes.shape == (12_345,)
    assert not block.bytes.any()
    block.bytes.copy_(torch.arange(12_345) % 251)
    assert torch.equal(block.bytes, (torch.arange(12_345) % 251).to(torch.uint8))


def test_released_memory_is_given_back_and_comes_back_as_zeros_at_the_same_address():
    block = make_block()
    tensor = block.bytes.view(torch.float32)
    address, before = tensor.data_ptr(), used_bytes()
    tensor.fill_(3.5)
    assert used_bytes() - before > 0.95 * SIZE
    block.release()
    assert not block.resident
    assert used_bytes() - before < 0.05 * SIZE
    block.restore()
    assert block.resident
    assert block.bytes.data_ptr() == address
    assert used_bytes() - before < 0.05 * SIZE
    tensor[7] = 2.0
    assert float(tensor.sum()) == 2.0


def test_memory_that_is_not_touched_costs_nothing():
    before = used_bytes()
    block = make_block(2**32)
    block.bytes[2**31] = 1
    assert used_bytes() - before < SIZE


def test_more_memory_than_there_is_is_refused_with_what_was_asked_for():
    with pytest.raises(HeadraceError, match=r"room for all of a block.*1048576.00 GiB.*cache_tokens"):
        Block(2**50, CPU)


def test_memory_lives_as_long_as_the_last_tensor_over_it():
    before = used_bytes()
    block = make_block()
    tensor = block.bytes[SIZE // 2 :]
    block.bytes.fill_(7)
    del block
    gc.collect()
    assert int(tensor.min()) == 7
    del tensor
    assert used_bytes() - before < 0.05 * SIZE


def test_the_cache_is_zero_after_a_restore_and_where_it_was():
    kv = KvCache(MODEL, 16, 4, torch.float32, CPU)
    keys, values = kv.layer(1)
    addresses = keys.data_ptr(), values.data_ptr()
    kv.copy([0], [1])
    keys.fill_(2.0)
    kv.release()
    kv.restore()
    assert (kv.layer(1)[0].data_ptr(), kv.layer(1)[1].data_ptr()) == addresses
    assert not kv.layer(1)[0].any()
    rows = kv.row_index(np.array([3]), np.array([2]))
    kv.write(1, rows, torch.full((1, 2, 8), 5.0), torch.full((1, 2, 8), 6.0))
    assert keys[:, 3, 2].unique().tolist() == [5.0]
    assert values.sum() == 6.0 * 16


# ── Weights ──────────────────────────────────────────────────────────────────────────────────────────────


def values_of(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: live.detach().clone() for name, live in weights._live.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def write(weights: Weights, version: int) -> dict[str, torch.Tensor]:
    expected = {name: p.detach() for name, p in random_model(MODEL, version).named_parameters()}
    for name, buffer in weights.standby.items():
        buffer.copy_(expected[name])
    return expected


def test_parameters_keep_their_values_in_one_block_and_those_of_one_product_lie_side_by_side():
    model, expected = random_model(MODEL, 3), random_model(MODEL, 3)
    weights = Weights(model)
    assert same(values_of(weights), {name: p.detach() for name, p in expected.named_parameters()})
    tensors = dict(model.named_parameters())
    joined = joined_names(MODEL)
    assert len(joined) == 2 * 3  # q, k, v and their biases, gate and up; two layers
    for names in joined:
        together = side_by_side([tensors[name] for name in names])
        assert torch.equal(together, torch.cat([tensors[name] for name in names]))
        standby = side_by_side([weights.standby[name] for name in names])
        assert torch.equal(standby, together)
    behind_another = {name for names in joined for name in names[1:]}
    assert all(tensor.data_ptr() % ALIGN == 0 for name, tensor in tensors.items() if name not in behind_another)
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values())
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))


@pytest.mark.parametrize("piece", [PIECE_BYTES, 1000])
@pytest.mark.parametrize("flipped", [False, True])
def test_kept_weights_come_back_where_they_were(monkeypatch, piece, flipped):
    monkeypatch.setattr("headrace.engine.native.weights.PIECE_BYTES", piece)
    weights = Weights(random_model(MODEL, 3))
    if flipped:
        write(weights, 4)
        weights.flip()
    before, addresses = values_of(weights), {name: p.data_ptr() for name, p in weights._live.items()}
    standby = {name: buffer.data_ptr() for name, buffer in weights.standby.items()}
    weights.release(keep=True)
    assert not next(iter(weights._live.values())).any()
    assert weights.complete
    weights.restore()
    assert same(values_of(weights), before)
    assert {name: p.data_ptr() for name, p in weights._live.items()} == addresses
    assert {name: buffer.data_ptr() for name, buffer in weights.standby.items()} == standby
    assert same(dict(weights.standby), before)


def test_without_weights_a_version_is_written_where_it_will_be_served():
    weights = Weights(random_model(MODEL, 3))
    write(weights, 4)
    weights.flip()
    addresses = {name: p.data_ptr() for name, p in weights._live.items()}
    weights.release(keep=False)
    assert not weights.complete
    with pytest.raises(HeadraceError, match="nothing since the weights were given up"):
        weights.flip()
    expected = write(weights, 5)
    assert not weights._blocks[0].resident
    assert not weights.complete
    weights.flip()
    assert weights.complete
    assert (weights.side, same(values_of(weights), expected)) == (1, True)
    assert {name: p.data_ptr() for name, p in weights._live.items()} == addresses
    # The second set has memory again with its next use.
    newer = write(weights, 6)
    assert same(values_of(weights), expected)
    weights.flip()
    assert (weights.side, same(values_of(weights), newer)) == (0, True)


def test_buffers_made_in_inference_mode_are_written_outside_of_it():
    weights = Weights(random_model(MODEL, 3).requires_grad_(False))
    with torch.inference_mode():
        weights.flip()
    expected = write(weights, 4)
    weights.flip()
    assert same(values_of(weights), expected)
    name = next(iter(expected))
    weights.standby[name].fill_(2.0)
    weights.take([name])
    assert float(weights._live[name].mean()) == 2.0


def test_a_part_of_the_weights_is_not_enough_where_there_are_none():
    weights = Weights(random_model(MODEL, 3))
    write(weights, 4)
    name = next(iter(weights.standby))
    weights.release(keep=False)
    with pytest.raises(SyncError, match="nothing is in standby"):
        weights.take([name])
    write(weights, 5)
    with pytest.raises(SyncError, match="nothing is in standby"):
        weights.take([name])


def test_weights_released_twice_are_kept_once_and_can_still_be_given_up():
    weights = Weights(random_model(MODEL, 3))
    before = values_of(weights)
    weights.release(keep=True)
    weights.release(keep=True)
    weights.restore()
    assert same(values_of(weights), before)
    weights.release(keep=True)
    weights.release(keep=False)
    assert not weights.complete


# ── CUDA's addresses, with a driver that only keeps books ────────────────────────────────────────────────

MIB = 2**20


class FakeDriver:
    """Memory of `room` bytes, of which a mapping takes some until it is unmapped. Refuses what CUDA would."""

    def __init__(self, room: int):
        self.room, self.cached_by_torch = room, 0
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.handles: dict[int, int] = {}
        self.count = 0

    @property
    def used(self) -> int:
        return sum(self.mapped.values()) + self.cached_by_torch

    def cuMemGetAllocationGranularity(self, granularity, kind, option):
        assert (kind._obj.type, kind._obj.location.type, kind._obj.location.id, option) == (1, 1, 0, 0)
        granularity._obj.value = 2 * MIB
        return 0

    def cuMemAddressReserve(self, address, size, alignment, wanted, flags):
        assert (size % (2 * MIB), alignment, wanted, flags) == (0, 0, 0, 0)
        address._obj.value = 2**40 * (1 + len(self.reserved))
        self.reserved[address._obj.value] = size
        return 0

    def cuMemAddressFree(self, address, size):
        assert not any(address <= mapped < address + size for mapped in self.mapped)
        assert self.reserved.pop(address) == size
        return 0

    def cuMemCreate(self, handle, size, kind, flags):
        if self.used + size > self.room:
            return 2
        self.count += 1
        handle._obj.value = self.count
        self.handles[self.count] = size
        return 0

    def cuMemRelease(self, handle):
        del self.handles[handle.value]
        return 0

    def cuMemMap(self, address, size, offset, handle, flags):
        assert (self.handles[handle.value], offset, flags) == (size, 0, 0)
        assert any(first <= address and address + size <= first + whole for first, whole in self.reserved.items())
        assert address not in self.mapped
        self.mapped[address] = size
        return 0

    def cuMemSetAccess(self, address, size, access, count):
        assert (self.mapped[address], access._obj.flags, count) == (size, 3, 1)
        self.accessible.add(address)
        return 0

    def cuMemUnmap(self, address, size):
        assert self.mapped.pop(address) == size
        self.accessible.discard(address)
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver(room=64 * MIB)
    monkeypatch.setattr(memory, "_driver", lambda: fake)
    monkeypatch.setattr(memory, "PIECE_BYTES", 8 * MIB)
    for name, what in {
        "init": lambda: None,
        "current_device": lambda: 0,
        "synchronize": lambda device: None,
        "mem_get_info": lambda device: (fake.room - fake.used, fake.room),
        "empty_cache": lambda: setattr(fake, "cached_by_torch", 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, what)
    yield fake
    gc.collect()


def test_memory_is_mapped_in_pieces_as_far_as_it_is_wanted_and_unmapped_again(driver):
    block = Block(21 * MIB, torch.device("cuda"))
    assert driver.reserved == {2**40: 22 * MIB}
    assert not driver.mapped
    block.restore(9 * MIB)
    assert list(driver.mapped.values()) == [8 * MIB, 8 * MIB]
    assert not block.resident
    block.restore()
    assert driver.mapped == {2**40: 8 * MIB, 2**40 + 8 * MIB: 8 * MIB, 2**40 + 16 * MIB: 6 * MIB}
    assert driver.accessible == driver.mapped.keys()
    assert not driver.handles
    assert block.resident
    block.release()
    assert not block.resident
    assert (driver.mapped, len(driver.reserved)) == ({}, 1)
    block.restore()
    assert driver.used == 22 * MIB
    del block
    assert (driver.mapped, driver.reserved) == ({}, {})


def test_where_the_device_has_too_little_nothing_is_taken_and_the_error_says_how_much(driver):
    first, second = Block(40 * MIB, torch.device("cuda")), Block(30 * MIB, torch.device("cuda"))
    first.restore()
    with pytest.raises(
        HeadraceError, match=r"0\.01 GiB of 0\.03 GiB missing, 0\.00 GiB free.*let the trainer free"
    ):
        second.restore()
    assert driver.used == 40 * MIB
    first.release()
    second.restore()
    assert driver.used == 30 * MIB


def test_what_torch_has_freed_and_kept_is_taken_when_it_is_needed(driver):
    driver.cached_by_torch = 60 * MIB
    block = Block(2 * MIB, torch.device("cuda"))
    block.restore()
    assert driver.cached_by_torch == 60 * MIB
    other = Block(40 * MIB, torch.device("cuda"))
    other.restore()
    assert (driver.cached_by_torch, driver.used) == (0, 42 * MIB)


def test_a_call_that_the_driver_refuses_is_named_with_its_code(driver, monkeypatch):
    block = Block(20 * MIB, torch.device("cuda"))
    monkeypatch.setattr(driver, "cuMemMap", lambda *_: 1)
    with pytest.raises(HeadraceError, match=r"cuMemMap succeeds.*CUDA_ERROR_INVALID_VALUE, code 1"):
        block.restore()
    assert (driver.used, driver.handles) == (0, {})


def test_the_structures_are_laid_out_as_the_driver_reads_them():
    prop, access = memory._AllocationProp, memory._AccessDesc
    assert (ctypes.sizeof(prop), ctypes.sizeof(access)) == (32, 12)
    assert (prop.location.offset, prop.win32_handle_meta_data.offset, prop.compression_type.offset) == (8, 16, 24)
    assert access.flags.offset == 8
