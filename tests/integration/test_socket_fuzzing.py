"""A short form of what `python tests/fuzz/run.py http rendezvous` does at length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent / "fuzz" / "run.py"


@pytest.mark.parametrize("target", ["http", "rendezvous"])
def test_bytes_of_any_kind_cause_no_fault(target: str, tmp_path: Path) -> None:
    words = [target, "--inputs", "600", "--bytes", "1", "--seconds", "30", "--faults", str(tmp_path)]
    done = subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[0])
    assert (found["faults"], found["inputs"] >= 100) == (0, True)
    assert found["peak_mib_above_input"] < 64
