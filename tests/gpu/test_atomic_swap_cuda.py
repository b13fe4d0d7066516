"""Law 4 by the thousand on a GPU: as tests/contract/test_atomic_swap.py, through CUDA IPC and over CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import native_process
import numpy as np
import pytest
from swaps_under_load import REPLAYED, RUNNING, check, swapped

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""The versions' models are computed on the CPU. One tensor of another version moves 95 % of the tokens by more."""


@pytest.fixture(autouse=True)
def heads_that_kernels_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_process, "MODEL", replace(native_process.MODEL, head_dim=32))
    native_process.version_of.cache_clear()
    yield
    native_process.version_of.cache_clear()


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_no_pass_sees_two_versions(tmp_path: Path, transport: str):
    load = swapped(tmp_path, 1000, transport=transport, device="cuda")
    assert np.median(load.running[1:]) >= RUNNING / 2, "swaps came under load"
    found = check(load, TOLERANCE)
    print(found)
    assert (found.mixed, found.mixed_replayed) == (0, 0)
    assert found.versions >= 1000
    assert found.tokens > 10_000
    assert found.replayed > REPLAYED


@pytest.mark.parametrize("torn", ["one_tensor_one_pass_late", "one_by_one"])
def test_a_swap_that_is_not_atomic_is_caught(tmp_path: Path, torn: str):
    load = swapped(tmp_path, 40, transport="cuda_ipc", device="cuda", entry=f"torn_swaps:{torn}")
    assert check(load, TOLERANCE).mixed > 20
