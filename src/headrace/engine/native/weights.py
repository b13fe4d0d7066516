"""Live and standby parameters: two whole sets of buffers that change places, each in one block of memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine.native.memory import PIECE_BYTES, Block
from headrace.errors import HeadraceError, SyncError
from headrace.models import CausalLM
from headrace.sync import lay_out


class Weights:
    """A forward pass reads the live set alone; another thread may meanwhile write into `standby`.

    Projections of one input lie next to each other in both sets, so that one product computes them. Whoever writes
    the standby buffers waits for its own stream before it calls for the swap, and is done before a release.

    After `release(keep=False)` there are no weights until a whole version has been written and flipped
    (`complete`). With nothing to protect it is written where it will be served, so a second set is not needed.
    """

    def __init__(self, model: CausalLM):
        self._live = dict(model.named_parameters())
        self._places, self._size = _lay_out(self._live)
        self._blocks = [Block(self._size, self.device), Block(self._size, self.device)]
        """By side."""
        self._sets: list[dict[str, Tensor]] = [{}, {}]
        """The parameters in each block, in the live ones' order."""
        self._move_in()
        self._kinds = _kinds(self._live.values())
        self._kept: list[Tensor] = []
        """The live set while it has no memory of its own, in pieces."""
        self._lost = False
        """Whether the standby set had memory, was given up, and has not been asked for since."""
        self._retired: torch.cuda.Event | None = None
        self.side = 0
        """Which of the two sets is live: 0 at first, then 1, then 0, …"""
        self.complete = True
        """Whether there are weights to serve, in place or kept."""

    @property
    def standby(self) -> Mapping[str, Tensor]:
        """The standby buffers under their Hugging Face names, first a copy of the live ones.

        Waits for the passes that read them while they were live, and for copies from them. Brings back the memory
        that is released.
        """
        self.restore()
        self._lost = False
        if not self.complete:
            return MappingProxyType({name: live.data for name, live in self._live.items()})
        self._have_standby()
        if self._retired is not None:
            self._retired.synchronize()
        return MappingProxyType(self._standby)

    @property
    def live(self) -> Mapping[str, Tensor]:
        """What passes read, once what was copied there is there. Refused where it has no memory."""
        if not self.complete or not self._blocks[self.side].resident:
            raise HeadraceError("an engine that sleeps has no weights in place", "asleep", "wake it first")
        if self._retired is not None:
            self._retired.synchronize()
        return MappingProxyType({name: live.data for name, live in self._live.items()})

    def refresh(self) -> None:
        """Make the standby set a copy of the live one, on the caller's stream."""
        self.standby  # noqa: B018 - waits for whoever reads it
        if self.complete:
            live, there = self._blocks[self.side].bytes, self._blocks[1 - self.side].bytes
            if self.device.type == "cpu":
                np.copyto(there.numpy(), live.numpy())
            else:
                there.copy_(live)

    @property
    def _standby(self) -> dict[str, Tensor]:
        return self._sets[1 - self.side]

    def flip(self) -> None:
        """Pointers only. Either all of them or, with an error, none."""
        if not self.complete:
            if not self._blocks[self.side].resident:
                raise HeadraceError(
                    "a swap serves what was written to the standby buffers",
                    "nothing since the weights were given up",
                    "transfer a whole version first",
                )
            self.complete = True
            return
        if self._lost:
            raise SyncError("swap", "the standby buffers", "what was written there was given up; transfer it again")
        self.restore()
        self._have_standby()
        standby = self._standby.values()
        if (kinds := _kinds(standby)) != self._kinds:
            each = zip(self._live, zip(*kinds, strict=True), zip(*self._kinds, strict=True), strict=True)
            name, found, right = next(one for one in each if one[1] != one[2])
            why = f"the standby buffer of {name} became {found}, not {right}"
            raise SyncError("swap", "the standby buffers", why)
        for live, buffer in zip(self._live.values(), standby, strict=True):
            live.data = buffer
        self.side = 1 - self.side
        self._note_use()

    def take(self, names: Collection[str]) -> None:
        """Copy these parameters from their standby buffers to the live ones, after the passes under way."""
        unknown = set(names) - set(self._live)
        if unknown or not self.complete or not self._blocks[1 - self.side].resident:
            raise SyncError("swap", "the standby buffers", f"nothing is in standby for {sorted(unknown) or 'them'}")
        # One by one: a kernel for many would have to be loaded at the first swap, which takes milliseconds.
        for name in names:
            self._live[name].data.copy_(self._standby[name], non_blocking=True)
        self._note_use()

    def _note_use(self) -> None:
        """The standby buffers are read, or were until now, by what the device has been given so far."""
        if self.device.type == "cuda":
            self._retired = torch.cuda.Event()
            self._retired.record()

    @property
    def set_bytes(self) -> int:
        """Memory of one set."""
        return self._size

    def release(self, keep: bool) -> None:
        """Give the memory of both sets back, once the device has done what was begun.

        With `keep` the live set goes to host memory, pinned where the device is CUDA; otherwise it is lost.
        """
        live, standby = self._blocks[self.side], self._blocks[1 - self.side]
        if not keep:
            self._kept, self.complete = [], False
        elif self.complete and live.resident:
            # Torch pins memory by powers of two, so a piece takes no more than it holds.
            pinned = self.device.type == "cuda"
            self._kept = [
                torch.empty(len(piece), dtype=torch.uint8, pin_memory=pinned).copy_(piece)
                for piece in live.bytes.split(PIECE_BYTES)
            ]
        self._lost = self._lost or standby.resident
        live.release()
        standby.release()

    def restore(self) -> None:
        """Have the live set again, at the same addresses: as it was kept, or undefined.

        The other set comes back with its next use, as a copy. Raises HeadraceError, and changes nothing, where
        the device has too little memory.
        """
        block = self._blocks[self.side]
        if block.resident:
            return
        block.restore()
        for piece, kept in zip(block.bytes.split(PIECE_BYTES), self._kept, strict=False):
            piece.copy_(kept)
        self._kept = []

    @property
    def device(self) -> torch.device:
        return next(iter(self._live.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._live.values())).dtype

    def _move_in(self) -> None:
        """Let the parameters live in the first block. Memory comes as it is filled, so little is held twice."""
        block = self._blocks[0]
        moved = {}
        for name, place in self._places.items():
            block.restore(place.last)
            live = self._live[name]
            moved[name] = live.data = place.of(block.bytes).copy_(live.data)
        self._sets[0] = {name: moved[name] for name in self._live}
        torch.cuda.empty_cache()

    def _have_standby(self) -> None:
        """Memory for the standby set where it has none, with a copy of the live one."""
        block = self._blocks[1 - self.side]
        if block.resident:
            return
        block.restore()
        there = block.bytes.copy_(self._blocks[self.side].bytes)
        if not self._sets[1 - self.side]:
            self._sets[1 - self.side] = {name: self._places[name].of(there) for name in self._live}
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Place(NamedTuple):
    first: int
    last: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        """What lies there."""
        # Whatever the caller's mode: a view made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return block[self.first : self.last].view(self.dtype).view(self.shape)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[dict[str, _Place], int]:
    """(where each tensor lies in a block, the block's size): as in a published image, so that versions arrive by
    copies of long runs."""
    kinds = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }
    specs, size = lay_out(kinds)
    places = {
        spec.name: _Place(
            spec.offset, spec.offset + spec.nbytes, tensors[spec.name].shape, tensors[spec.name].dtype
        )
        for spec in specs
    }
    return places, size


def _kinds(each: Collection[Tensor]) -> tuple[list[torch.Size], list[torch.dtype], list[torch.device]]:
    """By what they are of: generation waits for it at every swap, and so it is quicker."""
    return [one.shape for one in each], [one.dtype for one in each], [one.device for one in each]
