"""The embedded engine: a synchronous core that a process around it feeds.

    add ──▶ queue ──▶ [ prompt pass │ suffix pass │ decode pass ] ──▶ sample ──▶ turns that ended
                         one of them per step

    core.py         NativeEngine: what a step does, swaps, turns
    scheduler.py    who runs: admission by free pages, sharing of prompts, preemption
    requests.py     checks of a request; a sequence and its KV lineage
    slots.py        the running sequences' state as arrays, one row each
    pages.py        which page of the KV cache belongs to whom
    prefix.py       prompts kept for requests that share them
    kv.py           the cache's tensors
    attention.py    what tokens attend to, over pages
    sampling.py     from logits to tokens, log-probs and supports
    weights.py      live and standby parameters

Attention, cache tensors and sampling are plain PyTorch for any device; faster ones replace those three files.
"""

from headrace.engine.native.core import NativeEngine

__all__ = ["NativeEngine"]
