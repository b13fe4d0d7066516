"""What the processes of the fault trials are forked from: all they need is imported, and nothing has begun with
CUDA, which would not survive a fork.

The garbage collector leaves all of it alone. A child's first look through what torch has loaded would copy that
memory page by page, which on a busy machine takes half a deadline, just when a version is announced to it.
"""

from __future__ import annotations

import gc
from importlib import import_module

for _name in (
    "fault_children",
    "headrace.engine.native.core",
    "headrace.engine.native.graphs",
    "headrace.kernels.cast",
    "headrace.kernels.digest",
    "headrace.tokenizer",
):
    import_module(_name)
gc.collect()
gc.freeze()
