"""Parts of an image: the bytes of a version's tensors, one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from headrace.sync.payload.changes import SIGNED, whole_numbers

CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class Region:
    """`count` elements of `unit` bytes each, from the byte `first` of the image on."""

    first: int
    unit: int
    count: int

    def __post_init__(self) -> None:
        if self.unit not in SIGNED:
            raise ValueError(f"an element has 1, 2, 4 or 8 bytes, got {self.unit}")
        if self.first < 0 or self.first % self.unit or self.count < 0:
            raise ValueError(f"a region begins at a multiple of its unit and has 0 elements or more, got {self}")

    @property
    def nbytes(self) -> int:
        return self.unit * self.count

    def of(self, image: torch.Tensor) -> torch.Tensor:
        """The elements as signed whole numbers: a view of `image`, which is flat and of bytes."""
        if image.dtype != torch.uint8 or image.dim() != 1 or self.first + self.nbytes > len(image):
            raise ValueError(f"{self} is not within an image of {image.dtype}{list(image.shape)}")
        return whole_numbers(image[self.first : self.first + self.nbytes], self.unit)


def chunks(regions: Iterable[Region]) -> Iterator[Region]:
    """The regions, larger ones in parts of CHUNK_ELEMENTS: what frames are made of."""
    for region in regions:
        for start in range(0, region.count, CHUNK_ELEMENTS):
            first = region.first + start * region.unit
            yield Region(first, region.unit, min(CHUNK_ELEMENTS, region.count - start))
