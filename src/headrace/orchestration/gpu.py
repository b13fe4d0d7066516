"""Whether a run's processes will find a GPU: asked of the driver, as the controller does not load torch."""

from __future__ import annotations

import ctypes
import functools
import sys
from importlib.util import find_spec
from pathlib import Path

_MAJOR = 75
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR."""
BFLOAT16_SINCE = 8
"""Ampere."""


@functools.cache
def has_bfloat16_gpu() -> bool:
    """Whether the first device computes in bfloat16, and torch was built for it. One of which nothing can be asked
    counts as none."""
    if not (sys.platform == "linux" and _torch_has_cuda()):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, major = ctypes.c_int(), ctypes.c_int()
        steps = (
            lambda: driver.cuInit(0),
            lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
            lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
        )
        return all(step() == 0 for step in steps) and major.value >= BFLOAT16_SINCE
    except (OSError, AttributeError):
        return False


def _torch_has_cuda() -> bool:
    found = find_spec("torch")
    return (
        found is not None
        and found.origin is not None
        and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
    )
