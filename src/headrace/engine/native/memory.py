"""Memory that is given back and taken again at the same addresses: CUDA graphs hold addresses, not tensors.

CUDA   reserve addresses ─▶ create pieces of memory, map them there, allow access ─▶ unmap them ─▶ …
CPU    map zero pages ─▶ touch them ─▶ advise that they are not needed ─▶ …
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import weakref
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import HeadraceError

PIECE_BYTES = 2**30
"""Most that is mapped at once, so that neither side needs much memory in one place."""


_MAPPED = {"now": 0, "most": 0}
"""Bytes of CUDA memory behind all blocks of this process."""


def most_mapped() -> int:
    """Most bytes of GPU memory that were behind the process's blocks at once."""
    return _MAPPED["most"]


class Block:
    """A range of addresses on one device, with memory behind them from `restore` to `release`.

    Tensors over it keep the addresses reserved; memory and addresses go with the last of them and the block. On
    CUDA whoever touches the range without memory behind it ends the process's context. Not thread-safe.
    """

    def __init__(self, size_bytes: int, device: torch.device):
        self.size = size_bytes
        self._range: _Range = _CudaRange(size_bytes, device) if device.type == "cuda" else _HostRange(size_bytes)

    @property
    def bytes(self) -> Tensor:
        """uint8, all of the range. On CUDA there is memory behind its beginning when this is called."""
        # Whatever the caller's mode: its buffers are written in place outside of inference mode too.
        with torch.inference_mode(False):
            return self._range.tensor()[: self.size]

    @property
    def resident(self) -> bool:
        return self._range.backed >= self.size

    def restore(self, until: int | None = None) -> None:
        """Put memory behind the range, or at least behind its first `until` bytes, where there is none.

        Its content is zero on the CPU and undefined on CUDA. Raises HeadraceError, and changes nothing, where the
        device has too little.
        """
        until = self.size if until is None else until
        if self._range.backed < until:
            self._range.back(until)

    def release(self) -> None:
        """Give the memory back, once the device has done all that was begun. Its content is lost."""
        if self._range.backed:
            self._range.release()


class _Range(Protocol):
    @property
    def backed(self) -> int:
        """The first bytes that have memory behind them."""
        ...

    def tensor(self) -> Tensor: ...

    def back(self, until: int) -> None: ...

    def release(self) -> None: ...


class _HostRange:
    def __init__(self, size: int):
        # Private: shared pages would outlive the advice. Untouched ones cost nothing.
        try:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise HeadraceError(
                "this machine has room for all of a block", _gib(size), "lower engine.cache_tokens"
            ) from error
        self.backed = 0

    def tensor(self) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def back(self, until: int) -> None:
        self.backed = len(self._map)

    def release(self) -> None:
        # What macOS does at once on this advice, Linux does on the other.
        advice = mmap.MADV_DONTNEED if sys.platform == "linux" else getattr(mmap, "MADV_FREE", mmap.MADV_DONTNEED)
        self._map.madvise(advice)
        self.backed = 0


# ── CUDA ─────────────────────────────────────────────────────────────────────────────────────────────────


class _CudaRange:
    """Tensors hold a reference to it, not to the block: `__cuda_array_interface__` is how they are made."""

    def __init__(self, size: int, device: torch.device):
        # An engine is a cycle of objects. The memory of one that was dropped comes back now, and not within the
        # capture of this one's graphs, which unmapping would spoil.
        gc.collect()
        torch.cuda.init()
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        _enter(self._device)
        location = _Location(LOCATION_DEVICE, self._device.index)
        self._kind = _AllocationProp(type=ALLOCATION_PINNED, location=location)
        self._access = _AccessDesc(location, ACCESS_READ_WRITE)
        granularity = c_size_t()
        _call("cuMemGetAllocationGranularity", byref(granularity), byref(self._kind), GRANULARITY_MINIMUM)
        self._size = -(-size // granularity.value) * granularity.value
        address = c_uint64()
        _call("cuMemAddressReserve", byref(address), self._size, 0, 0, 0)
        self._address = address.value
        self._pieces: list[int] = []
        """Sizes of what is mapped, from the beginning on."""
        # Not at exit: the driver may be gone by then, and gives everything back itself.
        weakref.finalize(self, _free, self._device, self._address, self._size, self._pieces).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    @property
    def backed(self) -> int:
        return sum(self._pieces)

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device)

    def back(self, until: int) -> None:
        before = len(self._pieces)
        _enter(self._device)
        try:
            while self.backed < until:
                self._map(min(PIECE_BYTES, self._size - self.backed))
        except HeadraceError:
            _unmap(self._address, self._pieces, keep=before)
            raise

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        _unmap(self._address, self._pieces)

    def _map(self, size: int) -> None:
        handle, address = self._create(size), self._address + self.backed
        try:
            _call("cuMemMap", address, size, 0, handle, 0)
        finally:
            # The mapping keeps the memory; without one it is free again.
            _call("cuMemRelease", handle)
        self._pieces.append(size)
        _MAPPED["now"] += size
        _MAPPED["most"] = max(_MAPPED.values())
        _call("cuMemSetAccess", address, size, byref(self._access), 1)

    def _create(self, size: int) -> c_uint64:
        handle = c_uint64()
        code = _driver().cuMemCreate(byref(handle), size, byref(self._kind), 0)
        if code == OUT_OF_MEMORY:
            # Torch keeps what it has freed, for its own next tensors. Only now, as giving it up stops the device.
            torch.cuda.empty_cache()
            code = _driver().cuMemCreate(byref(handle), size, byref(self._kind), 0)
        if code == OUT_OF_MEMORY:
            free = torch.cuda.mem_get_info(self._device)[0]
            raise HeadraceError(
                f"{self._device} has room for all of a block",
                f"{_gib(self._size - self.backed)} of {_gib(self._size)} missing, {_gib(free)} free",
                "let the trainer free its memory first, or lower engine.cache_tokens",
            )
        _check("cuMemCreate", code)
        return handle


def _unmap(address: int, pieces: list[int], keep: int = 0) -> None:
    while len(pieces) > keep:
        size = pieces.pop()
        _MAPPED["now"] -= size
        _call("cuMemUnmap", address + sum(pieces), size)


def _free(device: torch.device, address: int, size: int, pieces: list[int]) -> None:
    torch.cuda.synchronize(device)
    _unmap(address, pieces)
    _call("cuMemAddressFree", address, size)


def _enter(device: torch.device) -> None:
    """Make the device's context this thread's, which the driver's calls need and only the runtime's bring about."""
    torch.cuda.mem_get_info(device)


# From cuda.h
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
ACCESS_READ_WRITE = 3
GRANULARITY_MINIMUM = 0
OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", _Location),
        ("win32_handle_meta_data", c_void_p),
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_AllocationProp), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_AccessDesc), c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _ARGUMENTS.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _call(function: str, *arguments: Any) -> None:
    _check(function, getattr(_driver(), function)(*arguments))


def _check(function: str, code: int) -> None:
    if code:
        name = c_char_p()
        _driver().cuGetErrorName(code, byref(name))
        raise HeadraceError(
            f"the CUDA driver's {function} succeeds",
            f"{(name.value or b'unknown').decode()}, code {code}",
            "an earlier failure on the device may be the cause: see the first error in the log",
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
