"""Weight sync through CUDA IPC under faults: as tests/integration/test_sync_faults.py, on one GPU.

What fails says its number. To repeat number 17 alone:

    python tests/integration/fault_trials.py --device cuda 17
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fault_trials import CUDA_LINKS, FAMILIES, carry_out, complaints, draw, table

pytestmark = pytest.mark.gpu

# Nothing is stored on a disk.
APPLYING = [family for family, _ in FAMILIES if family != "full disk"]


@pytest.mark.timeout(600)
def test_weight_sync_on_one_gpu_heals_after_any_fault(tmp_path: Path):
    drawn = [draw(number, CUDA_LINKS) for number in range(len(CUDA_LINKS) * len(APPLYING))]
    outcomes = asyncio.run(carry_out(drawn, tmp_path, device="cuda"))
    print(table(outcomes))
    assert complaints(outcomes) == []
    for link in CUDA_LINKS:
        struck = [o.trial.family for o in outcomes if (o.trial.transport, o.trial.payload) == link]
        assert sorted(struck) == sorted(APPLYING)
