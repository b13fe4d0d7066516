"""Kernels in CUDA C++: compiled when first needed by the NVRTC that comes with PyTorch, launched by the driver.

For the few that Triton cannot express. Everything is of the device that is current.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MAX_DYNAMIC_SHARED = 8
_EARLY_LAUNCH = 6
_BFLOAT16, _SWIZZLE_128, _PROMOTE_128 = 9, 3, 2
_MAP_BYTES, _MAP_ALIGN = 128, 64


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint64 * 8))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", c_uint),
    )


class TensorMap(ctypes.Structure):
    """What the copy engine is told of a matrix, an argument of a kernel."""

    _fields_ = (("words", c_uint64 * (_MAP_BYTES // 8)),)


class Kernel:
    """`name` of the source, with dynamic shared memory of `shared_bytes`."""

    def __init__(self, source: str, name: str, constants: Mapping[str, int], shared_bytes: int):
        self._shared_bytes = shared_bytes
        # The driver works in the thread's context; this gives it one.
        torch.cuda.mem_get_info()
        module, self._function = c_void_p(), c_void_p()
        _check("cuModuleLoadData", byref(module), compiled(source, constants, _architecture()))
        _check("cuModuleGetFunction", byref(self._function), module, name.encode())
        _check("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(self, grid: tuple[int, int, int], threads: int, arguments: tuple[Any, ...], *, early: bool) -> None:
        """On the current stream. `arguments` are ctypes values; `early`: see `kernels.launch`."""
        attribute = _Attribute(_EARLY_LAUNCH, 0, (c_uint64 * 8)(1))
        how = _Launch(
            (c_uint * 3)(*grid),
            (c_uint * 3)(threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            ctypes.pointer(attribute),
            int(early),
        )
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        _check("cuLaunchKernelEx", byref(how), self._function, pointers, None)


def tensor_map(matrix: Tensor, rows: int, columns: int) -> TensorMap:
    """Of a bfloat16 matrix that is fetched in tiles of `rows` × `columns`, 128 bytes a row; zeros lie outside.

    Its rows begin at multiples of 16 bytes.
    """
    return _tensor_map(matrix.data_ptr(), *matrix.shape, 2 * matrix.stride(0), rows, columns)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, height: int, width: int, row_bytes: int, rows: int, columns: int) -> TensorMap:
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGN)
    place = -(-ctypes.addressof(room) // _MAP_ALIGN) * _MAP_ALIGN
    _check(
        "cuTensorMapEncodeTiled", c_void_p(place), _BFLOAT16, 2, c_void_p(address),
        (c_uint64 * 2)(width, height), (c_uint64 * 1)(row_bytes), (c_uint32 * 2)(columns, rows),
        (c_uint32 * 2)(1, 1), 0, _SWIZZLE_128, _PROMOTE_128, 0,
    )  # fmt: skip
    return TensorMap.from_buffer_copy(ctypes.string_at(place, _MAP_BYTES))


def source_of(file: str) -> str:
    """A kernel's source beside this module, after what it asks of the device."""
    folder = Path(__file__).parent
    return (folder / "hopper.cuh").read_text() + (folder / file).read_text()


@cache
def available() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None and _nvrtc() is not None


def compiled(source: str, constants: Mapping[str, int], architecture: str) -> bytes:
    """The device's code. RuntimeError with the compiler's words where it finds faults."""
    library = _nvrtc()
    if library is None:
        raise RuntimeError("there is no NVRTC to compile CUDA kernels with")
    program, size = c_void_p(), c_size_t()

    def call(name: str, *arguments: Any) -> None:
        if status := getattr(library, f"nvrtc{name}")(*arguments):
            raise RuntimeError(f"nvrtc{name} answered {status}")

    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    given = (c_char_p * len(options))(*(option.encode() for option in options))
    call("CreateProgram", byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        if library.nvrtcCompileProgram(program, len(options), given):
            call("GetProgramLogSize", program, byref(size))
            words = ctypes.create_string_buffer(size.value)
            call("GetProgramLog", program, words)
            raise RuntimeError(f"NVRTC does not compile a kernel: {words.value.decode()}")
        call("GetCUBINSize", program, byref(size))
        code = ctypes.create_string_buffer(size.value)
        call("GetCUBIN", program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    # With the instructions that later architectures do not have.
    return f"sm_{major}{minor}a"


def _check(name: str, *arguments: Any) -> None:
    library = _driver()
    if status := getattr(library, name)(*arguments):
        words = c_char_p()
        library.cuGetErrorString(status, byref(words))
        raise RuntimeError(f"{name}: {(words.value or b'unknown error').decode()}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _nvrtc() -> ctypes.CDLL | None:
    for name in _nvrtc_names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _nvrtc_names() -> Iterator[str]:
    major = (torch.version.cuda or "").split(".")[0]
    yield f"libnvrtc.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages.submodule_search_locations or []) if packages else []:
        yield from (str(file) for file in sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}")))
    yield f"/usr/local/cuda/lib64/libnvrtc.so.{major}"
