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


def may_have_gpu() -> bool:
    """Whether there is one, for all that can be told: a Mac has none that CUDA runs on, and AMD's driver is not
    asked."""
    if sys.platform == "darwin":
        return False
    return sys.platform != "linux" or Path("/dev/kfd").exists() or _compute_capability() > 0


def has_bfloat16_gpu() -> bool:
    """Whether the first device computes in bfloat16, and torch was built for it. One of which nothing can be asked
    counts as none."""
    return sys.platform == "linux" and _torch_has_cuda() and _compute_capability() >= BFLOAT16_SINCE


@functools.cache
def _compute_capability() -> int:
    """Of the first device that CUDA's driver finds, as far as the point; 0 if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, major = ctypes.c_int(), ctypes.c_int()
        steps = (
            lambda: driver.cuInit(0),
            lambda: driver.cuDeviceGet(ctypes.byref(device), 0),
            lambda: driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
        )
        return major.value if all(step() == 0 for step in steps) else 0
    except (OSError, AttributeError):
        return 0


def _torch_has_cuda() -> bool:
    found = find_spec("torch")
    return (
        found is not None
        and found.origin is not None
        and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
    )
