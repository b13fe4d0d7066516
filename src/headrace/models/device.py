"""From the host to where a pass computes."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """On `device`; on the CPU the tensor itself. To a GPU by way of pinned memory: a copy from other memory has the
    host wait until the device has done all that it was given before."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
