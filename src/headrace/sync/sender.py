"""The trainer's end: makes a version's image and offers it, whole or as what changed.

    stage     lay out, choose the stream, ask the transport for memory: the manifest
    pack      fill it from the trainer's tensors, which may change once this has returned: the seal
    again     offer the version once more, whole, to engines that could not take it

With the payload "delta" a copy of the last image is held, on the tensors' device: what changed is found against it,
and whoever has another version than the one before gets the image itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from headrace.errors import SyncError
from headrace.records import WeightVersion
from headrace.sync.base import AdapterSpec, Destination, Manifest, Outlet, Seal, Stream
from headrace.sync.held import Held
from headrace.sync.payload.full import copy_bytes
from headrace.sync.payload.packer import Packer

WORTH = 0.7
"""A delta of more than this share of the image is not worth its trouble."""


class Sender:
    """One version at a time. Not thread-safe."""

    def __init__(
        self,
        outlet: Outlet,
        *,
        payload: str = "full",
        dtype: torch.dtype | None = None,
        anchor_every: int = 50,
    ):
        """Floating-point tensors are published as `dtype`; None: as they are. With the payload "delta" every
        `anchor_every`-th version is offered whole."""
        self._outlet = outlet
        self._payload = payload
        self._packer = Packer(dtype, outlet.align)
        self._anchor_every = anchor_every
        self._since_anchor = 0
        self._held: Held | None = None
        self._manifest: Manifest | None = None
        self._seal: Seal | None = None
        self._fill: Callable[[], Tensor] | None = None
        self._image: Tensor | None = None
        """Where the version that was packed last lies whole: in the transport's memory, or held."""

    def send(
        self,
        version: WeightVersion,
        tensors: Mapping[str, Tensor],
        *,
        adapter: AdapterSpec | None = None,
        to: Sequence[Destination] = (),
    ) -> tuple[Manifest, Seal]:
        """`stage` and `pack` in one."""
        return self.stage(version, tensors, adapter=adapter, to=to), self.pack()

    def stage(
        self,
        version: WeightVersion,
        tensors: Mapping[str, Tensor],
        *,
        adapter: AdapterSpec | None = None,
        to: Sequence[Destination] = (),
    ) -> Manifest:
        """Begin to offer a version to these engines. The tensors must not change before `pack` has returned."""
        if not tensors:
            raise SyncError("announce", "trainer", f"version {version.number} has no tensors")
        specs, nbytes = self._packer.image_of(tensors)
        before = self._manifest.streams if self._manifest is not None and self._outlet.keeps else ()
        self._manifest = self._seal = self._fill = self._image = None
        draft = Manifest(
            version=version,
            payload=self._payload,
            transport=self._outlet.name,
            tensors=specs,
            nbytes=nbytes,
            streams=before,
            adapter=adapter,
        )
        if self._payload == "delta":
            return self._stage_changes(draft, tensors, to)
        return self._offer_whole(
            draft, to, _device(tensors), lambda image: self._packer.pack(specs, tensors, image, self._tell)
        )

    def pack(self) -> Seal:
        """Complete the version that was staged."""
        if self._manifest is None or self._fill is None:
            raise SyncError("transfer", "trainer", "no version was staged")
        self._image, self._fill = self._fill(), None
        seal = Seal(number=self._manifest.version.number, checksums=self._checksums(self._manifest))
        self._outlet.retain([stream.number for stream in self._manifest.streams])
        self._seal = seal
        return seal

    def again(self, number: int, to: Sequence[Destination]) -> tuple[Manifest, Seal]:
        """Offer the version that was packed last once more, whole, whatever these engines have. Raises SyncError
        where that cannot be, because its bytes have changed since say: then it is to be staged anew."""
        if self._manifest is None or self._seal is None or self._manifest.version.number != number:
            raise SyncError("announce", "trainer", f"version {number} is not at hand any more")
        manifest, seal, held = self._manifest, self._seal, self._held
        # Where this fails, what was offered before is not to be built upon.
        self._manifest = self._seal = None
        if manifest.streams[-1].base is None:
            # The transport first: it knows whether the bytes can be read at all.
            stream = msgspec.structs.replace(manifest.streams[-1], location=self._outlet.reopen(to))
            if self._checksums(manifest) == seal.checksums:
                self._manifest, self._seal = msgspec.structs.replace(manifest, streams=(stream,)), seal
                return self._manifest, seal
        if held is not None:
            whole = self._offer_whole(manifest, to, held.image.device, lambda image: copy_bytes(held.image, image))
            if self.pack().checksums == seal.checksums:
                return whole, seal
        self._manifest = self._seal = self._held = self._image = None
        self._packer.forget()
        raise SyncError("announce", "trainer", f"the bytes of version {number} were damaged where they lie")

    def close(self) -> None:
        self._held = self._manifest = self._seal = self._fill = self._image = None
        self._packer.forget()
        self._outlet.close()

    def _checksums(self, manifest: Manifest) -> tuple[int, ...]:
        """Of the tensors as they are now in the image."""
        assert self._image is not None
        return self._packer.checksums(manifest.tensors, self._image)

    def _stage_changes(self, draft: Manifest, tensors: Mapping[str, Tensor], to: Sequence[Destination]) -> Manifest:
        held = self._held
        if held is None or held.specs != draft.tensors:
            held = Held(draft.tensors, draft.nbytes, _device(tensors))
        base, self._held = held.number, None
        # A version that is staged anew is no change of itself.
        due = base in (None, draft.version.number) or self._since_anchor + 1 >= self._anchor_every
        frames = held.take(draft.version.number, tensors, compare=not due)
        self._held = held
        stream = Stream(number=draft.version.number, nbytes=sum(map(len, frames)), base=base)
        offered = msgspec.structs.replace(draft, streams=_leading_to(draft.streams, stream))
        reached = all(offered.route(one.version) for one in to)
        if due or not reached or stream.nbytes > WORTH * draft.nbytes:
            return self._offer_whole(draft, to, held.image.device, lambda image: copy_bytes(held.image, image))
        self._since_anchor += 1
        memory = self._open(offered, to, torch.device("cpu"))

        def fill() -> Tensor:
            end = 0
            for frame in frames:
                memory[end : end + len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
                end += len(frame)
            self._outlet.advance(end)
            return held.image

        self._fill = fill
        assert self._manifest is not None
        return self._manifest

    def _offer_whole(
        self, draft: Manifest, to: Sequence[Destination], device: torch.device, fill: Callable[[Tensor], None]
    ) -> Manifest:
        self._since_anchor, self._told = 0, 0
        stream = Stream(number=draft.version.number, nbytes=draft.nbytes)
        image = self._open(msgspec.structs.replace(draft, streams=(stream,)), to, device)

        def complete() -> Tensor:
            fill(image)
            if image.device.type == "cuda":
                torch.cuda.current_stream(image.device).synchronize()
            if self._told < len(image):
                self._outlet.advance(len(image))
            return image

        self._fill = complete
        assert self._manifest is not None
        return self._manifest

    def _open(self, draft: Manifest, to: Sequence[Destination], device: torch.device) -> Tensor:
        """Memory for the draft's last stream, whose location the manifest then has."""
        memory = self._outlet.open(draft, to, device)
        last = msgspec.structs.replace(draft.streams[-1], location=self._outlet.location())
        self._manifest = msgspec.structs.replace(draft, streams=(*draft.streams[:-1], last))
        return memory

    def _tell(self, filled: int) -> None:
        self._told = filled
        self._outlet.advance(filled)


def _leading_to(kept: Sequence[Stream], stream: Stream) -> tuple[Stream, ...]:
    """The stream behind those that lead to its base, where such are kept."""
    return (*kept, stream) if kept and kept[-1].number == stream.base else (stream,)


def _device(tensors: Mapping[str, Tensor]) -> torch.device:
    return next(iter(tensors.values())).device
