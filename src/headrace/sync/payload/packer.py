"""Fills images from a trainer's tensors, version after version, and tells their checksums.

What an image looks like, where its tensors come from and on a GPU the tables of its kernels depend on names, shapes
and addresses alone. Those stay from one step to the next, so they are prepared once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.sync.base import TensorSpec
from headrace.sync.digest import Digester, digests_of_bytes, has_kernels
from headrace.sync.layout import ALIGN
from headrace.sync.payload.full import BUCKET_BYTES, flat_bytes, image_of, pack, place

Specs = tuple[TensorSpec, ...]
Advance = Callable[[int], None]


class Packer:
    def __init__(self, dtype: torch.dtype | None, align: int = ALIGN):
        """As `image_of`."""
        self._dtype, self._align = dtype, align
        self._kinds: tuple[object, ...] = ()
        """Names, dtypes and shapes that the layout is of."""
        self._layout: tuple[Specs, int] = (), 0
        self._pairing: tuple[object, ...] = ()
        """The places of the last version and of its tensors. What lies at a tensor's address is that tensor."""
        self._way: _OnCpu | _OnCuda | None = None
        """Prepared for that pairing."""
        self._image: tuple[int, Specs] = 0, ()
        """What the digester is of."""
        self._digester: Digester | None = None

    def image_of(self, tensors: Mapping[str, Tensor]) -> tuple[Specs, int]:
        """Where each tensor goes and the bytes of all."""
        kinds = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if kinds != self._kinds:
            self.forget()
            self._kinds, self._layout = kinds, image_of(tensors, self._dtype, self._align)
        return self._layout

    def pack(self, specs: Specs, tensors: Mapping[str, Tensor], image: Tensor, advance: Advance) -> None:
        """As `full.pack`."""
        sources = [tensors[spec.name] for spec in specs]
        found = tuple((source.data_ptr(), source.dtype, source.is_contiguous()) for source in sources)
        # On the CPU an image may lie elsewhere each time; what is prepared there does not depend on it.
        address = image.data_ptr() if image.device.type == "cuda" else 0
        pairing = address, specs, found
        if pairing != self._pairing:
            # Tensors that are others each time are neither worth preparing for nor to be held.
            self._pairing, self._way = pairing, None
        elif self._way is None:
            possible = [way for way in _WAYS if way.is_for(specs, sources, image)]
            self._way = possible[0](specs, sources, image) if possible else None
        if self._way is None:
            pack(specs, tensors, image, advance)
        else:
            self._way.pack(image, advance)

    def checksums(self, specs: Specs, image: Tensor) -> tuple[int, ...]:
        """Of the tensors as they are now in the image."""
        if image.device.type == "cpu":
            raw = image.numpy().data
            return tuple(digests_of_bytes([raw[spec.offset : spec.offset + spec.nbytes] for spec in specs]))
        if self._digester is None or self._image != (image.data_ptr(), specs):
            self._digester = Digester([place(spec, image) for spec in specs])
            self._image = image.data_ptr(), specs
        return tuple(self._digester.digests())

    def forget(self) -> None:
        """Let go of tensors and images."""
        self._pairing, self._way = (), None
        self._image, self._digester = (0, ()), None


class _OnCpu:
    """Tensors that are published as they are: runs of bytes."""

    def __init__(self, specs: Specs, sources: Sequence[Tensor], image: Tensor):
        self._runs = [
            (spec.offset, flat_bytes(source).numpy()) for spec, source in zip(specs, sources, strict=True)
        ]

    @staticmethod
    def is_for(specs: Specs, sources: Sequence[Tensor], image: Tensor) -> bool:
        return image.device.type == "cpu" and all(
            source.device.type == "cpu" and source.is_contiguous() and str(source.dtype) == f"torch.{spec.dtype}"
            for spec, source in zip(specs, sources, strict=True)
        )

    def pack(self, image: Tensor, advance: Advance) -> None:
        there, end, told = image.numpy(), 0, 0
        for first, source in self._runs:
            there[end:first] = 0
            for start in range(0, len(source), BUCKET_BYTES):
                part = source[start : start + BUCKET_BYTES]
                end = first + start + len(part)
                np.copyto(there[first + start : end], part)
                if end - told >= BUCKET_BYTES:
                    advance(end)
                    told = end
        there[end:] = 0
        advance(len(there))


class _OnCuda:
    """All tensors cast and copied in one launch for each pair of dtypes."""

    def __init__(self, specs: Specs, sources: Sequence[Tensor], image: Tensor):
        from headrace.kernels.cast import Casts

        self._casts = Casts(sources, [place(spec, image) for spec in specs])
        # The gaps between tensors are never written again.
        image.zero_()

    @staticmethod
    def is_for(specs: Specs, sources: Sequence[Tensor], image: Tensor) -> bool:
        if image.device.type != "cuda" or not has_kernels():
            return False
        from headrace.kernels.cast import Casts

        return all(Casts.possible(source, place(spec, image)) for spec, source in zip(specs, sources, strict=True))

    def pack(self, image: Tensor, advance: Advance) -> None:
        self._casts.run()
        torch.cuda.current_stream(image.device).synchronize()
        advance(len(image))


_WAYS: tuple[type[_OnCpu] | type[_OnCuda], ...] = (_OnCpu, _OnCuda)
