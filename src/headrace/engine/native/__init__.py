"""The embedded engine: a synchronous core that a process around it feeds.

add ──▶ queue ──▶ scheduler: Plan ──▶ runner: passes and sampling ──▶ Outcome ──▶ turns that ended
                   one token of each sequence that is up to date,
                   chunks of those that are not

core.py         NativeEngine: requests, swaps, sleep, steps
scheduler.py    who runs: admission by free pages, sharing of beginnings, chunks, preemption
requests.py     checks of a request; a sequence and its KV lineage
turns.py        from a request to its sequence, and from that to its turn
forks.py        what a fork takes over from its source
interrupts.py   what a swap does to a sequence that has begun
slots.py        the running sequences' state as arrays, one row each
pages.py        which page of the KV cache belongs to whom
tree.py         beginnings of sequences that are kept for others
plan.py         what a step does, as data; what a runner is
outcomes.py     what a step gave, taken in
served.py       all weights that passes read, and their versions:
weights.py        live and standby parameters
quantized.py      the projections in FP8, beside the live ones
adapters.py       LoRA adapters, stacked, and their standby buffers
kv.py           the cache's tensors
memory.py       memory that can be given back and had again at the same addresses

runners.py      which of the two carries out the steps:
reference.py      plain PyTorch on any device, with attention.py and sampling.py
graphs.py         Triton kernels and CUDA graphs, one step ahead, with staging.py and headrace.kernels
"""

from headrace.engine.native.core import NativeEngine

__all__ = ["NativeEngine"]
