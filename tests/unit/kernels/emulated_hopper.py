"""`hopper_decode.cu` on the CPU: its text, compiled by g++ with the model of the device in `emulated_hopper.h`."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_float, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import cuda
from headrace.kernels import hopper_decode as H

MODEL = Path(__file__).with_name("emulated_hopper.h")
FOLDER = Path(cuda.__file__).parent
COMPILER = shutil.which("g++")
# No check of longjmp: fibers leave their stacks by it.
OPTIONS = ("-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-fPIC", "-shared")
PADDING = 64
"""Elements between rows of queries and of results that are nobody's."""


class Fault(Exception):
    """The kernel did what the device forbids, or waits forever."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("maps", H.Maps),
        *((name, c_void_p) for name in ("q", "table", "items", "merges")),
        *((name, c_void_p) for name in ("out", "partial", "statistics")),
        ("projected", H.ProjectedArguments),
        ("counters", c_void_p),
        *((name, c_int) for name in ("pieces", "q_stride", "out_stride", "head_rows", "table_stride")),
        ("scale", c_float),
        *((name, c_int) for name in ("blocks", "threads")),
    )


class _Write(ctypes.Structure):
    _fields_ = (("to", c_void_p), ("source", c_void_p), ("bytes", c_uint64))


class Kernels:
    """Kernels compiled into a folder, each once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[tuple[str, tuple[int, ...]], ctypes.CDLL] = {}

    def get(
        self,
        dim: int,
        queries: int,
        groups: int,
        page: int,
        change: Callable[[str], str] | None = None,
        *,
        projected: bool = False,
        norm: bool = False,
    ) -> ctypes.CDLL:
        """`change`: of the kernel's text."""
        text = (FOLDER / "hopper_decode.cu").read_text()
        constants = H.constants(dim, queries, groups, page, projected, norm)
        key = (change(text) if change else text, tuple(constants.values()))
        if key not in self._made:
            self._made[key] = self._make(f"kernel{len(self._made)}", constants, key[0])
        return self._made[key]

    def _make(self, name: str, constants: dict[str, int], text: str) -> ctypes.CDLL:
        source, library = self._folder / f"{name}.cu", self._folder / f"{name}.so"
        source.write_text(text)
        defined = [f"-D{constant}={value}" for constant, value in constants.items()]
        command = [COMPILER or "g++", *OPTIONS, *defined, f'-DKERNEL="{source}"', "-x", "c++", MODEL, "-o", library]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ does not compile the kernel: {done.stderr}")
        made = ctypes.CDLL(str(library))
        made.run.argtypes = [c_uint32, c_uint32, c_void_p, c_int, c_void_p, c_int]
        made.run.restype = c_char_p
        return made


def attend_single(
    kernel: ctypes.CDLL,
    q_thd: Tensor,
    keys_gnsd: Tensor,
    values_gnsd: Tensor,
    table: np.ndarray,
    items: np.ndarray,
    merges: np.ndarray,
    projected: H.Projected | None = None,
    *,
    seed: int = 0,
    blocks: Sequence[int] = (4,),
    resident: int = 8,
) -> list[Tensor]:
    """What launches one after the other, of so many blocks, give after a kernel that writes slowly.

    That one writes all that is read, but the first launch's table and items, which may be read before it has ended.
    `resident`: blocks that run at the same time, at most. With `projected` the caches are written.
    """
    (tokens, heads, dim), (groups, pages, page, _) = q_thd.shape, keys_gnsd.shape
    late = _Late()
    row = heads * dim + PADDING
    q = _padded(_bits(q_thd).reshape(tokens, -1))
    late.write(q)
    caches = [_bits(cache).reshape(-1, dim) for cache in (keys_gnsd, values_gnsd)]
    for cache in caches:
        late.write(cache)
    works = [[np.array(one, np.int32, order="C") for one in (table, items, merges)] for _ in range(2)]
    for one in works[1]:
        late.write(one, before=0)

    given = [H.ProjectedArguments() for _ in range(2)]
    if projected is not None:
        given = [_given(projected, caches, late, written=i > 0) for i in range(2)]

    counters = np.zeros(H.counters_for(len(merges), groups), np.int32)
    pieces = groups * len(items)
    outs = [np.full((tokens, row), 0xFFFF, np.uint16) for _ in blocks]
    scratch = [np.full((len(items), heads, width), np.nan, np.float32) for width in (dim, 2)]
    launches = (_Launch * len(blocks))(
        *(
            _Launch(
                H.Maps(*(_map(cache, keys) for keys in (H.KEYS, H.FEW) for cache in caches)),
                *(one.ctypes.data for one in (q, *works[min(i, 1)], out, *scratch)),
                given[min(i, 1)],
                counters.ctypes.data,
                *(pieces, row, row, pages * page, table.shape[1]),
                math.log2(math.e) / math.sqrt(dim),
                *(min(pieces, count), 32 * H.WARPS),
            )
            for i, (out, count) in enumerate(zip(outs, blocks, strict=True))
        )
    )
    writes = (_Write * len(late.writes))(*late.writes)
    if words := kernel.run(seed, resident, writes, len(writes), launches, len(launches)):
        raise Fault(words.decode())
    assert not counters.any()
    if projected is not None:
        for tensor, cache in zip((keys_gnsd, values_gnsd), caches, strict=True):
            tensor.copy_(torch.from_numpy(cache.view(np.int16)).view(torch.bfloat16).view(tensor.shape))
    assert all((out[:, -PADDING:] == 0xFFFF).all() for out in outs)
    return [
        torch.from_numpy(out[:, :-PADDING].view(np.int16).copy()).view(torch.bfloat16).view(q_thd.shape)
        for out in outs
    ]


class _Late:
    """What the kernel before the first launch writes."""

    def __init__(self) -> None:
        self.writes: list[_Write] = []
        self._kept: list[np.ndarray] = []

    def write(self, array: np.ndarray, before: int = 0xFFFF) -> None:
        """What is in the array now; until then `before` is there."""
        copy = array.copy()
        array[...] = before
        self.keep(copy, array)
        self.writes.append(_Write(array.ctypes.data, copy.ctypes.data, copy.nbytes))

    def keep(self, *arrays: np.ndarray) -> None:
        """As long as this."""
        self._kept.extend(arrays)


def _given(projected: H.Projected, caches: list[np.ndarray], late: _Late, *, written: bool) -> H.ProjectedArguments:
    """`written`: by the kernel before, rows and norms too."""
    k, v, (cos, sin, *norms, eps), rows_t = projected
    by_token = [_padded(_bits(one).reshape(len(one), -1)) for one in (k, v)]
    turn, weights = [_bits(one) for one in (cos, sin)], [None if one is None else _bits(one) for one in norms]
    rows = np.array(rows_t.cpu().numpy(), np.int32)
    for one in (*by_token, *turn):
        late.write(one)
    for one in (rows, *(one for one in weights if one is not None)):
        late.keep(one)
        if written:
            late.write(one, before=0)
    pointers = (None if one is None else one.ctypes.data for one in (*by_token, *turn, *weights, *caches, rows))
    return H.ProjectedArguments(*pointers, *(one.shape[1] for one in by_token), eps)


def _padded(rows: np.ndarray) -> np.ndarray:
    padded = np.full((len(rows), rows.shape[1] + PADDING), 0xFFFF, np.uint16)
    padded[:, :-PADDING] = rows
    return padded


def _bits(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16).copy()


def _map(matrix: np.ndarray, keys: int) -> cuda.TensorMap:
    lines = matrix.reshape(-1, H.BOX)
    return cuda.TensorMap((c_uint64 * 16)(lines.ctypes.data, *lines.shape, keys * len(lines) // len(matrix)))
