from __future__ import annotations

import resource
import subprocess
import sys

REUSE = """
import resource, sys, torch
from headrace.training.host_memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    parts = [torch.ones(1 << 20) for _ in range(8)]
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_freed_memory_is_reused_without_page_faults() -> None:
    faults = int(subprocess.check_output([sys.executable, "-c", REUSE, "keep"]))
    pages = 5 * 8 * (4 << 20) // resource.getpagesize()
    assert faults < pages / 100
