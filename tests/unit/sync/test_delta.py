from __future__ import annotations

import math
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.errors import SyncError
from headrace.sync.payload import changes, delta, layers, regions
from headrace.sync.payload.delta import Frame, Region, apply, chunks, delta_entropy, encode, encode_chunk, frames
from headrace.sync.payload.frames import HEADER_BYTES

UNITS = (1, 2, 4, 8)


def image(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy())


def one_frame(stream: bytes) -> Frame:
    (frame,) = frames([memoryview(stream)])
    return frame


def decoded(stream: list[bytes], old: torch.Tensor) -> torch.Tensor:
    target = old.clone()
    for frame in frames(map(memoryview, stream)):
        apply(frame, frame.of(target))
    return target


def sealed(fields: bytes, body: bytes) -> bytes:
    """A frame with right checksums, whatever it says."""
    fields = fields[:56] + struct.pack("<I", zlib.crc32(body))
    return fields + struct.pack("<I", zlib.crc32(fields)) + body


def header(*, count: int, changed: int, unit: int = 2, flags: int = 0, shifts=(0, 0), lengths=(0,) * 8, first=0):
    return struct.pack("<4sQIIBBBB8I", b"HRD1", first, count, changed, unit, flags, *shifts, *lengths)


def raw_deflate(plain: bytes) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflater.compress(plain) + deflater.flush()


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy()


def adam_step(count: int, *, size: float, steps: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """bf16 bits before and after the last of some steps of lr 3e-6, of weights whose master is in fp32."""
    dice = np.random.default_rng(0)
    weights = dice.standard_normal(count, dtype=np.float32) * np.float32(0.02)
    momentum = np.zeros(count, np.float32)
    for _ in range(steps):
        before = bfloat16_bits(weights)
        momentum = np.float32(0.9) * momentum + np.float32(0.1) * dice.standard_normal(count, dtype=np.float32)
        weights = weights - np.float32(3e-6 * size) * momentum
    return before, bfloat16_bits(weights)


@st.composite
def versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[Region]]:
    """Two images and their regions: of any unit, from nothing changed to all, by little or by anything, the changes
    scattered or in runs, with bytes between that belong to no region."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new, found, first = [], [], [], 0
    for _ in range(draw(st.integers(0, 4))):
        unit, count = draw(st.sampled_from(UNITS)), draw(st.integers(0, 3000))
        share, reach = (
            draw(st.sampled_from((0, 0.001, 0.02, 0.3, 0.9, 1))),
            draw(st.sampled_from((1, 9, 400, 1 << 62))),
        )
        before = dice.integers(0, 256, count * unit, dtype=np.uint8)
        differences = dice.integers(-reach, reach + 1, count).astype(f"i{unit}")
        run = draw(st.sampled_from((1, 50)))
        differences[np.repeat(dice.random(count // run + 1) >= share, run)[:count]] = 0
        after = (before.view(f"i{unit}") + differences).view(np.uint8)
        gap = dice.integers(0, 256, -(-(first + len(before)) // 8) * 8 - first - len(before), dtype=np.uint8)
        found.append(Region(first, unit, count))
        old += [before, gap]
        new += [after, gap]
        first += len(before) + len(gap)
    empty = [np.empty(0, np.uint8)]
    return image(np.concatenate(old + empty)), image(np.concatenate(new + empty)), found


# ── Nothing is lost ──────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None, max_examples=200)
@given(versions=versions(), chunk=st.integers(1, 4000), block=st.sampled_from((8, 64, 1 << 19)))
def test_old_elements_and_the_frames_make_exactly_the_new_ones(versions, chunk, block):
    old, new, found = versions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "CHUNK_ELEMENTS", chunk)
        patch.setattr(changes, "_BLOCK", block)
        before = old.clone()
        stream = encode(old, new, found, threads=1)
        assert torch.equal(decoded(stream, old), new)
        assert torch.equal(old, before)
        assert len(stream) == sum(-(-region.count // chunk) for region in found)
        sizes = [region.nbytes for region in chunks(found)]
        assert all(len(frame) <= HEADER_BYTES + size for frame, size in zip(stream, sizes, strict=True))


@settings(deadline=None)
@given(versions=versions(), cuts=st.lists(st.integers(0, 40_000), max_size=30))
def test_a_stream_may_be_cut_anywhere(versions, cuts):
    old, new, found = versions
    stream = b"".join(encode(old, new, found, threads=1))
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    pieces = [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(decoded(pieces, old), new)


def test_a_frame_is_there_as_soon_as_its_last_byte_is():
    stream = [encode_chunk(torch.zeros(4), torch.tensor([0.0, 1, 0, 2]), first, 4) for first in (0, 16)]
    asked = []

    def pieces() -> Iterator[memoryview]:
        for frame in stream:
            asked.append(len(asked))
            yield memoryview(frame)

    arriving = frames(pieces())
    assert next(arriving).region == Region(0, 4, 4)
    assert asked == [0]
    assert next(arriving).region == Region(16, 4, 4)


@pytest.mark.parametrize("unit", UNITS)
def test_positions_and_differences_are_those_of_the_two_versions_and_wrap_around(unit):
    bounds = np.iinfo(f"i{unit}")
    old = np.array([5, bounds.max, 0, 7, bounds.min, -1], f"i{unit}").repeat(40)
    new = old.copy()
    new[[0, 50, 160, 239]] = [4, bounds.min, bounds.max, 1]
    frame = one_frame(encode_chunk(image(old), image(new), 64, unit))
    positions, differences = frame.changes()
    assert frame.region == Region(64, unit, 240)
    assert positions.tolist() == [0, 50, 160, 239]
    assert differences.dtype == getattr(torch, f"int{8 * unit}")
    assert differences.tolist() == [-1, 1, -1, 2]


def test_the_bytes_of_a_frame_are_as_documented():
    old = np.zeros(1000, np.int16)
    new = old.copy()
    new[[3, 4, 300, 999]] = [1, -1, 1, -700]
    stream = encode_chunk(image(old), image(new), 128, 2)
    fields = struct.unpack("<4sQIIBBBB8III", stream[:64])
    assert fields[:5] == (b"HRD1", 128, 1000, 4, 2)
    assert fields[-2:] == (zlib.crc32(stream[64:]), zlib.crc32(stream[:60]))
    # Gaps 3, 0, 295, 698: the lowest two bits apart, a plane of each. Values 1, 0, 1, 1398: trits 1, 0, 1, 2 in one
    # byte, and of 1396 the lowest three bits apart.
    assert fields[5:8] == (4, 2, 3)
    parts, start = [], 64
    for length in fields[8:16]:
        parts.append(stream[start : start + length])
        start += length
    assert start == len(stream)
    inflated = [zlib.decompress(part, -15) if part else b"" for part in (*parts[2:5], *parts[6:])]
    assert (parts[0], parts[1], parts[5]) == (b"", bytes([0b1010_0000, 0b1011_0000]), bytes([0, 0, 0b1000_0000]))
    assert inflated == [bytes([0, 0, 73, 174]), b"", bytes([1 + 0 * 3 + 1 * 9 + 2 * 27]), bytes([174]), b""]


def test_an_unchanged_chunk_is_a_header():
    weights = torch.randn(1000)
    stream = encode_chunk(weights, weights.clone(), 0, 4)
    assert len(stream) == HEADER_BYTES == 64
    assert one_frame(stream).changed == 0


@pytest.mark.parametrize("empty", [torch.empty(0, 3), torch.from_numpy(np.empty(0, np.float32))])
def test_no_elements_are_a_header_too(empty):
    frame = one_frame(encode_chunk(empty, empty, 8, 4))
    assert (frame.region, frame.changed) == (Region(8, 4, 0), 0)
    target = torch.arange(8, dtype=torch.uint8)
    apply(frame, frame.of(target))
    assert target.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_elements_travel_as_they_are_where_that_is_shorter():
    dice = np.random.default_rng(0)
    old, new = (dice.integers(0, 256, 4000, dtype=np.uint8) for _ in range(2))
    stream = encode_chunk(image(old), image(new), 0, 2)
    assert len(stream) == HEADER_BYTES + 4000
    frame = one_frame(stream)
    assert frame.bits is not None
    assert torch.equal(frame.bits, image(new).view(torch.int16))
    assert torch.equal(decoded([stream], image(old)), image(new))
    with pytest.raises(ValueError, match="has bits"):
        frame.changes()


def test_an_element_of_any_type_and_shape_can_be_a_chunk():
    old = torch.zeros(8, 16, dtype=torch.bfloat16, requires_grad=True)
    new = torch.zeros(8, 16, dtype=torch.bfloat16)
    new[2, 3] = 1.0
    positions, differences = one_frame(encode_chunk(old, new, 0, 2)).changes()
    assert (positions.tolist(), differences.tolist()) == ([35], [0x3F80])


def test_frames_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(regions, "CHUNK_ELEMENTS", 1000)
    before, after = adam_step(20_000, size=1)
    old, new = image(before), image(after)
    once = encode(old, new, [Region(0, 2, 20_000)], threads=1)
    assert len(once) == 20
    assert encode(old, new, [Region(0, 2, 20_000)], threads=5) == once
    assert encode(old, new, [Region(0, 2, 20_000)]) == once


# ── Size ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_entropy_is_that_of_positions_and_of_differences_tensor_by_tensor():
    old, new = np.zeros(16, np.int16), np.zeros(16, np.int16)
    new[[1, 5]] = [1, -1]
    two_of_eight = 8 * (0.25 * 2 + 0.75 * math.log2(4 / 3))
    first, second = Region(0, 2, 8), Region(16, 2, 8)
    assert delta_entropy(image(old), image(new), [first]) == pytest.approx(two_of_eight + 2)
    new[5] = 1
    assert delta_entropy(image(old), image(new), [first]) == pytest.approx(two_of_eight)
    assert delta_entropy(image(old), image(new), [second]) == 0
    new[8:] = [1, 2, 3, 4, 5, 6, 7, 8]
    assert delta_entropy(image(old), image(new), [first, second]) == pytest.approx(two_of_eight + 8 * 3)
    assert delta_entropy(image(old), image(new), [Region(0, 2, 0)]) == 0


def test_the_entropy_counts_a_tensor_as_one_whatever_the_chunks(monkeypatch):
    before, after = adam_step(20_000, size=1)
    arguments = image(before), image(after), [Region(0, 2, 20_000)]
    whole = delta_entropy(*arguments)
    monkeypatch.setattr(regions, "CHUNK_ELEMENTS", 999)
    assert delta_entropy(*arguments) == whole


@pytest.mark.parametrize(("size", "changed", "ratio"), [(1.0, 0.025, 1.03), (0.18, 0.005, 1.06)])
def test_a_training_step_takes_little_more_than_its_entropy(size, changed, ratio):
    """What the sparser one has more are tables of codes, which hardly show with the elements of a real tensor."""
    before, after = adam_step(1 << 20, size=size)
    assert np.mean(before != after) == pytest.approx(changed, rel=0.15)
    old, new, whole = image(before), image(after), [Region(0, 2, 1 << 20)]
    stream = encode(old, new, whole, threads=1)
    assert torch.equal(decoded(stream, old), new)
    assert 8 * sum(map(len, stream)) < ratio * delta_entropy(old, new, whole)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, 1])
@pytest.mark.parametrize("reach", [1, 20, 1000])
def test_dense_changes_take_little_more_than_their_entropy(share, reach):
    dice = np.random.default_rng(0)
    old = dice.integers(0, 1 << 31, 1 << 18, dtype=np.int32)
    differences = dice.integers(1, reach + 1, len(old)) * dice.choice([-1, 1], len(old))
    new = old + np.where(dice.random(len(old)) < share, differences, 0).astype(np.int32)
    whole = [Region(0, 4, len(old))]
    stream = encode(image(old), image(new), whole, threads=1)
    assert 8 * sum(map(len, stream)) < 1.06 * delta_entropy(image(old), image(new), whole)


def test_rows_that_never_change_cost_nothing():
    before, after = adam_step(1 << 20, size=1)
    rows, live = before.reshape(-1, 512), slice(None, None, 20)
    new = rows.copy()
    new[live] = after.reshape(-1, 512)[live]
    all_rows, live_rows = (
        sum(map(len, encode(image(a), image(b), [Region(0, 2, a.size)], threads=1)))
        for a, b in ((rows, new), (rows[live], new[live]))
    )
    assert all_rows < 1.1 * live_rows


# ── What arrives damaged ─────────────────────────────────────────────────────────────────────────────────


def some_stream() -> tuple[torch.Tensor, torch.Tensor, list[bytes]]:
    before, after = adam_step(3000, size=1)
    old, new = image(before), image(after)
    new[5000:5600] = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 600, dtype=np.uint8))
    stream = encode(old, new, [Region(0, 2, 2500), Region(5000, 8, 75), Region(5600, 1, 400)], threads=1)
    assert [frame.bits is not None for frame in frames(map(memoryview, stream))] == [False, True, False]
    return old, new, stream


def test_a_stream_that_ends_within_a_frame_is_refused():
    old, _, stream = some_stream()
    whole = b"".join(stream)
    between = np.cumsum([0, *map(len, stream)]).tolist()
    for length in range(len(whole)):
        if length in between:
            assert len(list(frames([memoryview(whole)[:length]]))) == between.index(length)
        else:
            with pytest.raises(SyncError, match="the delta ends within") as caught:
                decoded([whole[:length]], old)
            assert (caught.value.stage, caught.value.who) == ("transfer", "engine")


@settings(deadline=None)
@given(data=st.data())
def test_flipped_bits_are_noticed(data):
    old, _, stream = some_stream()
    damaged = bytearray(b"".join(stream))
    for bit in data.draw(st.sets(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=3)):
        damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SyncError):
        decoded([bytes(damaged)], old)


@settings(deadline=None, max_examples=500)
@given(data=st.data())
def test_damage_under_right_checksums_raises_or_stays_within_the_region(data):
    old, _, stream = some_stream()
    frame = bytearray(data.draw(st.sampled_from(stream)))
    body = bytearray(frame[64:])
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from((frame, body)))
        bits = 8 * (len(body) if part is body else 56)
        if bits:
            bit = data.draw(st.integers(0, bits - 1))
            part[bit // 8] ^= 1 << bit % 8
    damaged, target, refused = sealed(bytes(frame), bytes(body)), old.clone(), None
    try:
        for found in frames([memoryview(damaged)], who="engine-3"):
            apply(found, found.of(target))
            first, end = found.region.first, found.region.first + found.region.nbytes
            assert torch.equal(target[:first], old[:first])
            assert torch.equal(target[end:], old[end:])
            if found.bits is None:
                positions, _ = found.changes()
                assert len(positions) == found.changed
                assert all(0 <= position < found.region.count for position in positions.tolist())
                assert bool((positions.diff() > 0).all())
    except SyncError as error:
        refused = error
    if refused is not None:
        assert (refused.stage, refused.who) == ("transfer", "engine-3")
        assert torch.equal(target, old)


@settings(deadline=None)
@given(noise=st.binary(min_size=1, max_size=300))
def test_other_bytes_are_not_taken_for_frames(noise):
    with pytest.raises(SyncError):
        list(frames([memoryview(noise)]))


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (header(count=4, changed=5), b""),
        (header(count=1 << 27, changed=0), b""),
        (header(count=4, changed=0, unit=0), b""),
        (header(count=4, changed=0, unit=3), b""),
        (header(count=4, changed=0, first=1), b""),
        (header(count=4, changed=0, flags=8), b""),
        (header(count=0, changed=0, flags=1), b""),
        (header(count=4, changed=1, flags=1, lengths=(7, 0, 0, 0, 0, 0, 0, 0)), b"1234567"),
        (header(count=4, changed=1, lengths=(9, 0, 0, 0, 0, 0, 0, 0)), b"123456789"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(fields, body):
    with pytest.raises(SyncError, match="contradicts itself"):
        list(frames([memoryview(sealed(fields, body))]))


def frame_of(gaps: bytes, values: bytes, *, changed: int, count: int = 1 << 16) -> Frame:
    """One with these two streams of bytes and no others."""
    fields = header(count=count, changed=changed, lengths=(0, 0, len(gaps), 0, 0, 0, len(values), 0))
    return one_frame(sealed(fields, gaps + values))


def refusal(gaps: bytes, values: bytes, *, changed: int, count: int = 1 << 16) -> str:
    """Why such a frame is not applied."""
    target = torch.zeros(count, dtype=torch.int16)
    with pytest.raises(SyncError) as caught:
        apply(frame_of(gaps, values, changed=changed, count=count), target)
    assert not target.any()
    return str(caught.value)


def test_a_position_beyond_the_region_is_refused():
    last, beyond, values = raw_deflate(bytes([0, 98])), raw_deflate(bytes([0, 99])), raw_deflate(b"\0\0")
    assert frame_of(last, values, changed=2, count=100).changes()[0].tolist() == [0, 99]
    assert "it changes element 100" in refusal(beyond, values, changed=2, count=100)


def test_streams_of_another_length_than_announced_are_refused():
    two = raw_deflate(b"\0\0")
    assert "inflates to 2 bytes, not to 3" in refusal(two, two, changed=3)
    assert "does not end there" in refusal(two + b"more", two, changed=2)
    assert "does not inflate" in refusal(b"\xff\xff\xff", two, changed=2)
    assert "inflates to 0 bytes" in refusal(b"", two, changed=2)


def test_a_stream_that_inflates_to_far_more_than_announced_takes_no_memory():
    bomb = raw_deflate(bytes(50_000_000))
    two = raw_deflate(b"\0\0")
    tracemalloc.start()
    refusal(two, bomb, changed=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


def test_a_frame_beyond_the_image_is_refused():
    frame = one_frame(encode_chunk(torch.zeros(4), torch.ones(4), 64, 4))
    with pytest.raises(SyncError, match="the image has 79 bytes"):
        frame.of(torch.zeros(79, dtype=torch.uint8))
    assert frame.of(torch.zeros(80, dtype=torch.uint8)).shape == (4,)


# ── Calls that cannot be meant ───────────────────────────────────────────────────────────────────────────


def test_a_target_that_is_not_the_region_is_refused():
    frame = one_frame(encode_chunk(torch.zeros(4), torch.ones(4), 0, 4))
    for target in (torch.zeros(5, dtype=torch.int32), torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match="does not fit"):
            apply(frame, target)


def test_regions_and_chunks_state_what_they_must_be():
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes, got 3"):
        Region(0, 3, 1)
    with pytest.raises(ValueError, match="multiple of its unit"):
        Region(2, 4, 1)
    with pytest.raises(ValueError, match="not within an image"):
        encode(torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), [Region(0, 4, 3)])
    with pytest.raises(ValueError, match="got 7 bytes"):
        encode_chunk(torch.zeros(7, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8), 0, 2)
    with pytest.raises(ValueError, match="of one size"):
        encode_chunk(torch.zeros(7), torch.zeros(8), 0, 4)
    with pytest.raises(ValueError, match="contiguous"):
        encode_chunk(torch.zeros(4, 4).T, torch.zeros(4, 4), 0, 4)


def test_regions_are_cut_into_chunks_without_gap_or_overlap(monkeypatch):
    monkeypatch.setattr(regions, "CHUNK_ELEMENTS", 4)
    parts = [(part.first, part.unit, part.count) for part in chunks([Region(0, 2, 9), Region(32, 4, 4)])]
    assert parts == [(0, 2, 4), (8, 2, 4), (16, 2, 1), (32, 4, 4)]


# ── Devices ──────────────────────────────────────────────────────────────────────────────────────────────


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_on_the_cpu_torch_computes_nothing():
    """It would do so with a second pool of OpenMP threads, where this runs beside an engine's forward passes."""
    old, new, _ = some_stream()
    with Operations() as operations:
        stream = [
            encode_chunk(region.of(old), region.of(new), region.first, region.unit)
            for region in (Region(0, 2, 2500), Region(5000, 8, 75), Region(5600, 1, 400))
        ]
        for frame in frames(map(memoryview, stream)):
            apply(frame, frame.of(old))
    assert torch.equal(old, new)
    assert operations.names <= {"detach", "slice", "view"}


@settings(deadline=None)
@given(versions=versions())
def test_what_runs_on_a_device_finds_and_adds_the_same(versions):
    old, new, found = versions
    for region in found:
        before, after = region.of(old), region.of(new)
        gaps, differences = changes._find_torch(before, after)
        expected = changes.find(before, after)
        assert (gaps.dtype, differences.dtype) == (expected.gaps.dtype, expected.differences.dtype)
        assert np.array_equal(gaps, expected.gaps)
        assert np.array_equal(differences, expected.differences)
        target = before.clone()
        changes._add_torch(target, changes.positions_of(gaps), differences)
        assert torch.equal(target, after)


# ── Layers ───────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(data=st.data(), unit=st.sampled_from(UNITS))
def test_numbers_of_any_size_come_back(data, unit):
    most = 256**unit - 1
    number = st.one_of(*(st.integers(0, min(bound, most)) for bound in (2, 260, 70_000, most)))
    numbers = np.array(data.draw(st.lists(number, max_size=300)), f"u{unit}")
    packed = layers.pack(numbers)
    assert np.array_equal(layers.unpack(packed, len(numbers), numbers.dtype), numbers)


def test_differences_are_counted_outwards_from_minus_one():
    differences = np.array([-1, 1, -2, 2, 127, -128], np.int8)
    numbers = layers.fold(differences)
    assert numbers.tolist() == [0, 1, 2, 3, 253, 254]
    assert layers.unfold(numbers).tolist() == differences.tolist()


def test_the_face_of_the_payload_has_these_names():
    names = ["Frame", "Region", "apply", "chunks", "delta_entropy", "encode", "encode_chunk", "frames"]
    assert delta.__all__ == names
