"""Live and standby parameters: two whole sets of buffers that change places."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from headrace.errors import SyncError
from headrace.models import CausalLM


class Weights:
    """A forward pass reads the live set alone; another thread may meanwhile write into `standby`.

    `standby` always shows the current standby buffers under their Hugging Face names, first a copy of the live
    ones. On CUDA whoever writes them waits for its own stream before it calls for the swap.
    """

    def __init__(self, model: CausalLM):
        self._live = dict(model.named_parameters())
        self._standby = {name: live.detach().clone() for name, live in self._live.items()}
        self.standby: Mapping[str, Tensor] = MappingProxyType(self._standby)

    def flip(self) -> None:
        """Pointers only. Either all of them or, with an error, none."""
        for name, live in self._live.items():
            if _kind(self._standby[name]) != _kind(live):
                why = f"the standby buffer of {name} became {_kind(self._standby[name])}, not {_kind(live)}"
                raise SyncError("swap", "the standby buffers", why)
        for name, live in self._live.items():
            live.data, self._standby[name] = self._standby[name], live.data

    @property
    def device(self) -> torch.device:
        return next(iter(self._live.values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._live.values())).dtype


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
