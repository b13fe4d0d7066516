"""Versions, and what receives them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headrace.records import WeightVersion
from headrace.sync.base import Manifest, Outlet, Stream
from headrace.sync.deadline import Deadline

CPU = torch.device("cpu")


def version(number: int) -> WeightVersion:
    return WeightVersion(number=number, parent=number - 1, step=number)


def draft(number: int, nbytes: int, transport: str) -> Manifest:
    """Of one stream of bytes that are no tensors."""
    return Manifest(
        version=version(number),
        payload="full",
        transport=transport,
        tensors=(),
        nbytes=nbytes,
        streams=(Stream(number=number, nbytes=nbytes),),
    )


def opened(outlet: Outlet, number: int, content: torch.Tensor, filled: int | None = None) -> Stream:
    """A stream of these bytes on offer, of which so many are there; None: all."""
    memory = outlet.open(draft(number, len(content), outlet.name), (), CPU)
    memory.copy_(content)
    stream = Stream(number=number, nbytes=len(content), location=outlet.location())
    outlet.advance(len(content) if filled is None else filled)
    return stream


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def deadline(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, "engine", "a version")


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process, which has this module too."""
    paths = [str(Path(__file__).parent), *sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)
