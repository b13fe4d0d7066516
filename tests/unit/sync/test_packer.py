"""What is prepared once must not outlive what it was prepared for."""

from __future__ import annotations

import pytest
import torch

from headrace.sync.digest import digests
from headrace.sync.payload import packer as module
from headrace.sync.payload.full import image_of, pack
from headrace.sync.payload.packer import Packer

SHAPES = {"a": (3, 5), "b": (), "c": (0, 4), "d": (7,), "e": (40, 30)}


def draw(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def check(packer: Packer, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    """Against `full.pack`, into memory that was something else before."""
    specs, nbytes = packer.image_of(tensors)
    assert (specs, nbytes) == image_of(tensors, dtype)
    expected = torch.empty(nbytes, dtype=torch.uint8)
    pack(specs, tensors, expected)
    # The first time plainly, then prepared.
    for _ in range(3):
        image, told = torch.full((nbytes,), 7, dtype=torch.uint8), []
        packer.pack(specs, tensors, image, told.append)
        assert torch.equal(image, expected)
        assert told == sorted(told)
        assert told[-1] == nbytes
    places = [image[spec.offset : spec.offset + spec.nbytes] for spec in specs]
    assert packer.checksums(specs, image) == tuple(digests(places))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_versions_of_the_same_tensors_and_of_others(dtype: torch.dtype | None) -> None:
    packer, tensors = Packer(dtype), draw(0)
    check(packer, tensors, dtype)
    tensors["e"].add_(1.0)
    check(packer, tensors, dtype)
    check(packer, draw(1), dtype)
    check(packer, {**tensors, "e": tensors["e"].clone().T.contiguous().T}, dtype)
    check(packer, {**tensors, "f": torch.ones(9)}, dtype)
    check(packer, draw(2, torch.bfloat16), dtype)


def test_a_view_of_the_same_memory_with_other_strides_is_another_tensor() -> None:
    packer, square = Packer(None), torch.arange(16.0).view(4, 4)
    check(packer, {"w": square}, None)
    check(packer, {"w": square.T}, None)


def test_large_tensors_are_told_of_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", 1000)
    packer, tensors = Packer(None), {"a": torch.randn(700), "b": torch.randn(3)}
    specs, nbytes = packer.image_of(tensors)
    image = torch.empty(nbytes, dtype=torch.uint8)
    told: list[int] = []
    packer.pack(specs, tensors, image, lambda filled: None)
    packer.pack(specs, tensors, image, told.append)
    assert told == [1000, 2000, nbytes]


def test_preparing_that_fails_leaves_nothing_of_the_version_before(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, before, after = Packer(None), draw(0), draw(1)
    check(packer, before, None)

    def fail(*_: object) -> None:
        raise MemoryError

    specs, nbytes = packer.image_of(after)
    image = torch.empty(nbytes, dtype=torch.uint8)
    packer.pack(specs, after, image, lambda filled: None)
    with monkeypatch.context() as patch:
        patch.setattr(module._OnCpu, "__init__", fail)
        with pytest.raises(MemoryError):
            packer.pack(specs, after, image, lambda filled: None)
    check(packer, after, None)
