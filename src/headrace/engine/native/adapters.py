"""Resident LoRA adapters: stacked beside one another for the passes, and standby buffers for what arrives.

    standby of adapter a, by PEFT's names ── copied at a's swap ─▶ a's columns of the stacks, read by every pass

Shape letters: L layers, K projections of one input, N adapters, R columns of each, I in features, O out features.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.memory import PIECE_BYTES, Block
from headrace.engine.native.quantized import product_names
from headrace.errors import HeadraceError, SyncError
from headrace.models import CausalLM, Stack
from headrace.sync.base import AdapterSpec

ALIGN_BYTES = 256
FIRST_LAYER = "model.layers.0."
WITHOUT = ("lm_head", "model.embed_tokens")
"""Modules that no adapter may change: log-probs are computed from the weight."""


class _Projection(NamedTuple):
    """The adapters of one projection, in all layers."""

    down: Tensor
    """(L, N, R, I)."""
    up: Tensor
    """(L, O, N, R)."""

    def of(self, number: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        """One adapter's (L, rank, I) and (L, O, rank), or with all its columns."""
        return self.down[:, number - 1, :rank], self.up[:, :, number - 1, :rank]


@dataclass(eq=False, slots=True)
class _Standby:
    spec: AdapterSpec
    tensors: dict[str, tuple[Tensor, Tensor]]
    """By projection: (L, rank, I) and (L, O, rank), zeros in layers that the adapter leaves alone."""
    buffers: Mapping[str, Tensor]
    """By PEFT's names: parts of those."""
    retired: torch.cuda.Event | None = None
    """The last copy from them."""

    def settle(self) -> None:
        """Wait until nothing reads them any more."""
        if self.retired is not None:
            self.retired.synchronize()


class AdapterBank:
    """Adapters are numbered from 1; 0 is none, the base weights alone.

    `standby` may be called by another thread. All else is the engine's own, between two passes and on their stream.
    """

    def __init__(self, model: CausalLM, config: NativeEngineConfig, engine: str):
        self._engine = engine
        self._most, self._rank = config.max_adapters, config.max_adapter_rank
        self._layers = model.config.num_layers
        self._dtype, self._device = model.head_weight.dtype, model.head_weight.device
        self._projections: dict[str, _Projection] = {}
        self._stacks: dict[tuple[int, ...], Stack] = {}
        """By the identities of the parameters they go with, whose data lies elsewhere after each swap."""
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        """Of adapters that are resident or on their way."""
        self._resident: dict[str, AdapterSpec | None] = {}
        """What was swapped in last; None where it was given up in a sleep."""
        self._standby: dict[str, _Standby] = {}
        self._stale: set[int] = set()
        """Numbers whose columns are to be cleared when there is memory again."""
        self._kept: list[Tensor] = []
        """The stacks while they have no memory of their own, in pieces."""
        self._lay_out(model)

    # ── For the passes ───────────────────────────────────────────────────────────────────────────────────

    def stack_of(self, weights: tuple[Tensor, ...]) -> Stack | None:
        """A `models.adapted.StackOf`."""
        return self._stacks.get(tuple(map(id, weights)))

    @property
    def names(self) -> Mapping[str, int]:
        """The resident adapters' numbers."""
        return {name: self._numbers[name] for name in self._resident}

    @property
    def lost(self) -> list[str]:
        """Resident adapters whose weights were given up in a sleep."""
        return [name for name, spec in self._resident.items() if spec is None]

    @property
    def nbytes(self) -> int:
        """Memory of the stacks; the standby buffers of all adapters take no more than as much again."""
        return self._block.size

    # ── What arrives ─────────────────────────────────────────────────────────────────────────────────────

    def standby(self, spec: AdapterSpec) -> Mapping[str, Tensor]:
        """See `NativeEngine.adapter_standby`."""
        with self._lock:
            before = self._standby.get(spec.name)
            if before is not None:
                before.settle()
                if before.spec == spec:
                    return before.buffers
            modules = self._bound(spec)
            number = self._numbers.get(spec.name) or self._free_number(spec)
            if before is not None and (before.spec.rank, [*before.buffers]) == (spec.rank, _names(modules)):
                before.spec = spec
            else:
                self._standby[spec.name] = self._new_standby(spec, modules)
            self._numbers[spec.name] = number
            return self._standby[spec.name].buffers

    def arriving(self, name: str) -> int:
        """The number of an adapter that something is in standby for; SyncError where nothing is."""
        if name not in self._standby:
            why = f"nothing is in standby for adapter {name!r} (there is for {sorted(self._standby)})"
            raise SyncError("swap", self._engine, why)
        return self._numbers[name]

    def take(self, name: str) -> None:
        """Serve what is in standby for this adapter, after the passes under way: a copy or two for a projection."""
        self.restore()
        with self._lock:
            standby, number = self._standby[name], self._numbers[name]
            rank = standby.spec.rank
            before = self._resident.get(name)
            if before is not None and (before.rank, before.targets) != (rank, standby.spec.targets):
                self._clear(number)
            for projection, (down, up) in standby.tensors.items():
                live_down, live_up = self._projections[projection].of(number, rank)
                live_down.copy_(down, non_blocking=True)
                live_up.copy_(up, non_blocking=True)
            self.scales[number].fill_(standby.spec.alpha / rank)
            if self._device.type == "cuda":
                standby.retired = torch.cuda.Event()
                standby.retired.record()
            self._resident[name] = standby.spec

    def live(self, name: str) -> Mapping[str, Tensor]:
        """What passes read of a resident adapter, by PEFT's names, once what was copied there is there."""
        with self._lock:
            spec = self._resident.get(name)
            if spec is None or not self._block.resident:
                why = f"{self._engine} has {sorted(self._resident)}, some perhaps lost or asleep"
                raise HeadraceError(
                    f"adapter {name!r} is read where it is resident", why, "publish it, or wake the engine"
                )
            if name in self._standby:
                self._standby[name].settle()
            found: dict[str, Tensor] = {}
            for module in self._bound(spec):
                _, _, layer, projection = module.split(".", 3)
                both = self._projections[projection].of(self._numbers[name], spec.rank)
                found |= zip(_names([module]), (side[int(layer)] for side in both), strict=True)
            return MappingProxyType(found)

    def drop(self, name: str) -> int:
        """Forget an adapter that is resident or on its way; the number it had."""
        with self._lock:
            if name not in self._numbers:
                raise HeadraceError(
                    "an adapter that is dropped is resident or announced", name, f"one of {sorted(self._numbers)}"
                )
            number = self._numbers.pop(name)
            if self._resident.pop(name, None) is not None:
                self._stale.add(number)
                self._clear_stale()
            if name in self._standby:
                self._standby.pop(name).settle()
            return number

    # ── Sleep ────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, keep: bool) -> None:
        """Give the memory back, standby buffers too, once the device has done what was begun.

        With `keep` the resident adapters go to host memory, pinned where the device is CUDA; otherwise they are
        lost. What was on its way is forgotten.
        """
        with self._lock:
            for standby in self._standby.values():
                standby.settle()
            self._standby.clear()
            self._numbers = {name: self._numbers[name] for name in self._resident}
            if not keep:
                self._kept, self._resident = [], dict.fromkeys(self._resident)
            elif self._block.resident and self._resident:
                pinned = self._device.type == "cuda"
                self._kept = [
                    torch.empty(len(piece), dtype=torch.uint8, pin_memory=pinned).copy_(piece)
                    for piece in self._block.bytes.split(PIECE_BYTES)
                ]
            self._block.release()

    def restore(self) -> None:
        """Have memory again, at the same addresses: as it was kept, or zeros."""
        if self._block.resident:
            return
        self._block.restore()
        if self._kept:
            for piece, kept in zip(self._block.bytes.split(PIECE_BYTES), self._kept, strict=True):
                piece.copy_(kept)
        elif self._device.type == "cuda":
            # What nobody uses is multiplied with zeros, so it has to be numbers.
            self._block.bytes.zero_()
        self._kept = []
        self._clear_stale()

    # ── Inside ───────────────────────────────────────────────────────────────────────────────────────────

    def _lay_out(self, model: CausalLM) -> None:
        named = dict(model.named_parameters())
        inputs = [
            tuple(name.removeprefix(FIRST_LAYER).removesuffix(".weight") for name in names)
            for names in product_names(model.config)
            if names[0].startswith(FIRST_LAYER)
        ]
        sizes = {name: tuple(named[f"{FIRST_LAYER}{name}.weight"].shape) for names in inputs for name in names}
        layers, most, rank = self._layers, self._most, self._rank
        shapes: list[tuple[int, ...]] = []
        for names in inputs:
            shapes.append((layers, len(names), most, rank, sizes[names[0]][1]))
            shapes += [(layers, sizes[name][0], most, rank) for name in names]
        starts = [_aligned(4 * (most + 1))]
        for shape in shapes:
            starts.append(starts[-1] + _aligned(math.prod(shape) * self._dtype.itemsize))
        self._block = Block(starts[-1], self._device)
        self.restore()
        block = self._block.bytes
        self.scales = block[: 4 * (most + 1)].view(torch.float32)
        """(N + 1,): alpha / rank, by number."""
        tensors = iter(
            block[start : start + math.prod(shape) * self._dtype.itemsize].view(self._dtype).view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        )
        for names in inputs:
            down = next(tensors)
            for i, name in enumerate(names):
                self._projections[name] = _Projection(down[:, i], next(tensors))
            for layer in range(layers):
                ups = tuple(self._projections[name].up[layer].flatten(1) for name in names)
                ids = tuple(id(named[f"model.layers.{layer}.{name}.weight"]) for name in names)
                self._stacks[ids] = Stack(down[layer].flatten(0, 2), ups)
                for i in range(len(names) if len(names) > 1 else 0):
                    self._stacks[ids[i : i + 1]] = Stack(down[layer, i].flatten(0, 1), ups[i : i + 1])
        if self._device.type == "cuda":
            # The copies' kernels are loaded when they are first used, which takes longer than they do.
            for projection in self._projections.values():
                for live in projection.of(1, 1):
                    live.copy_(_zeros_like(live))

    def _clear_stale(self) -> None:
        if self._block.resident:
            for number in self._stale:
                self._clear(number)
            self._stale.clear()

    def _clear(self, number: int) -> None:
        for projection in self._projections.values():
            for live in projection.of(number):
                live.zero_()

    def _free_number(self, spec: AdapterSpec) -> int:
        taken = set(self._numbers.values())
        free = [number for number in range(1, self._most + 1) if number not in taken]
        if not free:
            why = f"all of engine.max_adapters = {self._most} are taken, by {sorted(self._numbers)}; drop one"
            raise self._refusal(spec, why)
        return free[0]

    def _bound(self, spec: AdapterSpec) -> list[str]:
        """The modules that its targets name, in the model's order, as PEFT binds them."""
        if not 1 <= spec.rank <= self._rank:
            raise self._refusal(
                spec, f"its rank, {spec.rank}, is not in 1 … engine.max_adapter_rank = {self._rank}"
            )
        if not math.isfinite(spec.alpha):
            raise self._refusal(spec, f"its alpha, {spec.alpha}, is not a number")
        if not spec.targets:
            raise self._refusal(spec, "it has no targets")
        modules = [f"model.layers.{i}.{name}" for i in range(self._layers) for name in self._projections]
        for target in spec.targets:
            if any(_binds(target, module) for module in WITHOUT):
                raise self._refusal(spec, f"its target {target!r} is the output head or the embedding")
            if not any(_binds(target, module) for module in modules):
                raise self._refusal(spec, f"its target {target!r} is no projection of this model's layers")
        return [module for module in modules if any(_binds(target, module) for target in spec.targets)]

    def _refusal(self, spec: AdapterSpec, why: str) -> SyncError:
        return SyncError("announce", self._engine, f"adapter {spec.name!r}: {why}")

    def _new_standby(self, spec: AdapterSpec, modules: list[str]) -> _Standby:
        tensors: dict[str, tuple[Tensor, Tensor]] = {}
        buffers: dict[str, Tensor] = {}
        for module in modules:
            _, _, layer, projection = module.split(".", 3)
            if projection not in tensors:
                down, up = self._projections[projection].of(1, spec.rank)
                tensors[projection] = _zeros_like(down), _zeros_like(up)
            down, up = tensors[projection]
            for name, tensor in zip(_names([module]), (down, up), strict=True):
                buffers[name] = tensor[int(layer)]
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return _Standby(spec, tensors, MappingProxyType(buffers))


def _zeros_like(tensor: Tensor) -> Tensor:
    """Contiguous, and whatever the caller's mode: it is written in place outside of inference mode too."""
    with torch.inference_mode(False):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _names(modules: list[str]) -> list[str]:
    """PEFT's, of their tensors."""
    return [f"base_model.model.{module}.lora_{side}.weight" for module in modules for side in "AB"]


def _binds(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
