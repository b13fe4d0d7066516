"""What the card draws: large steps run at the limit of power, and then at a lower clock than small ones."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import torch

_SM_CLOCK = 1


class Meter:
    """From its making on; `read` gives watts and the clock of this moment, or nothing where there is no NVML."""

    def __init__(self, device: torch.device):
        nothing: tuple[Any, Any] = None, None
        self._library, self._card = _nvml(device.index or 0) if device.type == "cuda" else nothing
        self._began, self._joules = time.perf_counter(), self._energy()

    def read(self) -> dict[str, float]:
        clock, joules = ctypes.c_uint(), self._energy()
        if self._library is None or joules is None or self._joules is None:
            return {}
        if self._library.nvmlDeviceGetClockInfo(self._card, _SM_CLOCK, ctypes.byref(clock)):
            return {}
        return {
            "watts": (joules - self._joules) / (time.perf_counter() - self._began),
            "sm_mhz": float(clock.value),
        }

    def _energy(self) -> float | None:
        used = ctypes.c_ulonglong()
        if self._library is None or self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._card, ctypes.byref(used)
        ):
            return None
        return used.value / 1e3


@cache
def _nvml(index: int) -> tuple[Any, Any]:
    """(library, handle of the card); None each where there is no NVML. It counts all cards, not those in sight."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None, None
    card = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card)):
        return None, None
    return library, card
