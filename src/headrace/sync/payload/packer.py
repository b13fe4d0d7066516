"""Fills images from a trainer's tensors, version after version, and tells their checksums.

What a version's image looks like, and on a GPU the tables of its kernels, depend on names, shapes and addresses
alone. Those stay from one step to the next, so they are prepared once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.sync.base import TensorSpec
from headrace.sync.digest import Digester, has_kernels
from headrace.sync.layout import ALIGN
from headrace.sync.payload.full import image_of, pack, place

if TYPE_CHECKING:
    from headrace.kernels.cast import Casts

Specs = tuple[TensorSpec, ...]


class Packer:
    def __init__(self, dtype: torch.dtype | None, align: int = ALIGN):
        """As `image_of`."""
        self._dtype, self._align = dtype, align
        self._kinds: tuple[object, ...] = ()
        self._layout: tuple[Specs, int] = (), 0
        self._ends: tuple[object, ...] = ()
        self._casts: Casts | None = None
        self._image: tuple[int, Specs] = 0, ()
        self._digester: Digester | None = None

    def image_of(self, tensors: Mapping[str, Tensor]) -> tuple[Specs, int]:
        """Where each tensor goes and the bytes of all."""
        kinds = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if kinds != self._kinds:
            self._kinds, self._layout = kinds, image_of(tensors, self._dtype, self._align)
        return self._layout

    def pack(
        self, specs: Specs, tensors: Mapping[str, Tensor], image: Tensor, advance: Callable[[int], None]
    ) -> None:
        """As `full.pack`."""
        if image.device.type != "cuda" or not has_kernels():
            pack(specs, tensors, image, advance)
            return
        sources = [tensors[spec.name] for spec in specs]
        found = tuple((source.data_ptr(), source.dtype, source.is_contiguous()) for source in sources)
        ends = image.data_ptr(), specs, found
        if ends != self._ends:
            self._prepare(specs, sources, image)
            self._ends = ends
        if self._casts is None:
            pack(specs, tensors, image, advance)
            return
        self._casts.run()
        torch.cuda.current_stream(image.device).synchronize()
        advance(len(image))

    def checksums(self, specs: Specs, image: Tensor) -> tuple[int, ...]:
        """Of the tensors as they are now in the image."""
        if image.device.type != "cuda":
            return tuple(Digester([place(spec, image) for spec in specs]).digests())
        if self._digester is None or self._image != (image.data_ptr(), specs):
            self._digester = Digester([place(spec, image) for spec in specs])
            self._image = image.data_ptr(), specs
        return tuple(self._digester.digests())

    def forget(self) -> None:
        """Let go of images."""
        self._ends, self._casts = (), None
        self._image, self._digester = (0, ()), None

    def _prepare(self, specs: Specs, sources: list[Tensor], image: Tensor) -> None:
        from headrace.kernels.cast import Casts

        places = [place(spec, image) for spec in specs]
        possible = all(map(Casts.possible, sources, places))
        self._casts = Casts(sources, places) if possible else None
        # Between tensors, and from then on.
        image.zero_()
