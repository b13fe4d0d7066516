"""All the weights that passes read: the base's, their FP8 copy, the adapters; and which versions those are."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from headrace.engine.config import NativeEngineConfig
from headrace.engine.native.adapters import AdapterBank
from headrace.engine.native.quantized import QuantizedWeights, check_fp8
from headrace.engine.native.requests import Served
from headrace.engine.native.weights import Weights
from headrace.errors import EpisodeFailure, HeadraceError, SyncError
from headrace.models import CausalLM


class ServedWeights:
    """Changes between two passes, on their stream."""

    def __init__(self, model: CausalLM, config: NativeEngineConfig, version: int, engine: str):
        check_fp8(config, model.config, model.head_weight.dtype, model.head_weight.device)
        self._engine = engine
        self.base = Weights(model)
        fused = config.kernels == "fused" and self.base.device.type == "cuda"
        self.quantized = QuantizedWeights(model, fused=fused) if config.weight_dtype == "fp8" else None
        self.adapters = AdapterBank(model, config, engine) if config.max_adapters else None
        self.versions = np.full(1 + config.max_adapters, version)
        """Of the base weights, then of each adapter by its number."""

    @property
    def standby_bytes(self) -> int:
        """Most that standby buffers take. Without a standby set now, one comes with the first version; an adapter's
        come with that."""
        return self.base.set_bytes + (0 if self.adapters is None else self.adapters.nbytes)

    @property
    def numbers(self) -> Mapping[str, int]:
        """Of the resident adapters."""
        return {} if self.adapters is None else self.adapters.names

    def number_of(self, adapter: str | None) -> int:
        """For a request with this adapter; EpisodeFailure where it is not resident."""
        if adapter is None:
            return 0
        if adapter not in self.numbers:
            raise EpisodeFailure(
                "unknown_adapter",
                f"{self._engine} has adapters {sorted(self.numbers)} of at most "
                f"engine.max_adapters = {len(self.versions) - 1} (got {adapter!r})",
            )
        return self.numbers[adapter]

    def now(self, adapter: int) -> Served:
        return Served.now(self.versions, adapter)

    def bank(self, stage: str, adapter: str) -> AdapterBank:
        """SyncError where there is none."""
        if self.adapters is None:
            raise SyncError(stage, self._engine, f"adapter {adapter!r}: engine.max_adapters = 0, so it serves none")
        return self.adapters

    def flip(self, only: Collection[str] | None) -> None:
        """Serve the standby weights, or these of them."""
        self.base.flip() if only is None else self.base.take(only)
        if self.quantized is not None:
            self.quantized.refresh(only)

    # ── Sleep ────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, keep: bool) -> None:
        """Give the memory back, once the device has done what was begun."""
        if self.quantized is not None:
            self.quantized.release()
        if self.adapters is not None:
            self.adapters.release(keep)
        self.base.release(keep)

    def check_whole(self) -> None:
        """Raise HeadraceError where something was lost in a sleep and has not come again."""
        lost = [] if self.base.complete else [f"none since version {self.versions[0]}"]
        lost += [] if self.adapters is None else [f"no adapter {name!r}" for name in self.adapters.lost]
        if lost:
            raise HeadraceError(
                "an engine that slept without its weights is given new ones before it wakes",
                f"{self._engine} has {', '.join(lost)}",
                "fill the standby buffers and swap, then wake it",
            )

    def restore(self) -> None:
        """Have memory again, at the same addresses."""
        self.base.restore()
        if self.adapters is not None:
            self.adapters.restore()
        if self.quantized is not None:
            self.quantized.restore()
