"""What launches have in common: sizes of their grids, and programmatic dependent launch.

The latter sets a kernel's blocks up while the one before it still ends. A kernel launched so must call `wait` in
every block before it returns, and before it touches memory that the kernel before it writes, or that may be written
by one before that: only then has all that came before it ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl


def blocks(size: int, block: int) -> int:
    """So many hold it. `triton.cdiv` takes several microseconds, at every launch."""
    return -(-size // block)


def power_of_two(size: int) -> int:
    """The least that is no less."""
    return 1 << max(size - 1, 0).bit_length()


def early() -> bool:
    """Whether the current device can; kernels take it as their constant EARLY, and as the option `launch_pdl`."""
    return _anywhere() and _capability(torch.cuda.current_device()) >= 9


@functools.cache
def _anywhere() -> bool:
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()


@functools.cache
def _capability(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until what came before has ended; then lets the next kernel be set up.

    In this order: the next one may read, before it waits itself, what was written before this one.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
