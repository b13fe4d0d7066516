"""Where a pass computes, in which dtype, and how its inputs get there."""

from __future__ import annotations

import torch
from torch import Tensor


def dtype_on(device: torch.device | str, name: str) -> torch.dtype:
    """The dtype of that name; `auto` is bfloat16 on a GPU that computes in it, float32 elsewhere."""
    if name != "auto":
        found = getattr(torch, name)
        assert isinstance(found, torch.dtype)
        return found
    device = torch.device(device)
    has = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return torch.bfloat16 if has else torch.float32


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`; on the CPU the tensor itself. To a GPU by way of pinned memory: a copy from other memory has the
    host wait until the device has done all that it was given before."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
