"""What cannot be derived from shapes: processes as such, a GPU's context, allocators; each with its origin."""

from __future__ import annotations

from headrace.memory_plan.needs import MIB

HOST_WITH_TORCH = 310 * MIB
"""A process that has imported torch and run passes on the CPU. Measured with torch 2.13: 223 MiB after the import;
the rest is what libraries and threads take with the first passes."""
ENGINE_WITH_TORCH = 390 * MIB
"""Likewise an engine, which also has the tokenizer and the buffers of sampling. Measured with torch 2.13."""
HOST_WITH_CUDA = 3 * 1024 * MIB
"""Likewise with CUDA's libraries loaded. An estimate, not measured."""
PEFT_IMPORT = 250 * MIB
"""PEFT brings transformers with it."""
CONTROLLER = 250 * MIB
"""The controller with the ledger, telemetry and one batch's episodes. Measured, 253 to 267 MiB in all."""
WORKER = 52 * MIB
"""An environment's or a scorer's process without what users' code imports. Measured."""
DEVICE_CONTEXT = 700 * MIB
"""CUDA's context, loaded kernels and the libraries' workspaces, of each process. An estimate for an H200."""
ALLOCATOR_SHARE = 0.06
"""Part of what passes allocate that torch's allocator holds beyond it, in blocks that do not fit anew."""
GRAPH_BYTES_PER_LAYER = int(0.7 * MIB)
"""Of one captured graph. An engine of 1.7B with 46 graphs of 28 layers held 2.3 GiB beyond weights and cache on an
H200, of which the context is 0.7 and the sampler's buffers 0.5."""
SPARE_SHARE = 0.03
"""Part of a GPU that nobody is given."""
HOST_SPARE_SHARE = 0.02
"""Part of the available host memory that nobody is given."""
CPU_CACHE_BYTES = 1 << 30
"""Most that a cache takes on a CPU where nothing says how large it is to be."""
