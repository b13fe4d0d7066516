"""Telling that memory ran out, on a GPU or a CPU, and giving back what can be given back."""

from __future__ import annotations

import gc

import torch

_SAID = (
    "out of memory",  # CUDA, and torch's allocator for it
    "can't allocate memory",  # torch's allocator on a CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, and nothing else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def free_memory(device: torch.device) -> None:
    """Let go of what nobody uses: called outside the `except` block, whose traceback holds tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def room(device: torch.device) -> str:
    """For messages: how much of the device is free."""
    if device.type != "cuda":
        return "host memory is used up"
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB of {torch.cuda.get_device_name(device)} are free"
