"""How weights travel. A channel joins a sender with its receivers; each transport's two ends share a file."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.sync.base import Receiver, Sender


def open_channel(transport: str, dtype: str | None = None) -> dict[str, Any]:
    """What both ends are given; weights are published as `dtype` ("bfloat16"), or as they are with None.

    Within one process it holds the shelf itself. For two processes it is plain data, `descriptor` being a file
    descriptor that both must inherit under the same number and that the caller closes.
    """
    if transport == "in_process":
        from headrace.sync.transport.in_process import Shelf

        return {"type": transport, "dtype": dtype, "shelf": Shelf()}
    return {"type": transport, "dtype": dtype, "descriptor": create_segment()}


def open_sender(channel: dict[str, Any]) -> Sender:
    """The trainer's end."""
    import torch

    dtype = getattr(torch, channel["dtype"]) if channel.get("dtype") else None
    if channel["type"] == "in_process":
        from headrace.sync.transport.in_process import InProcessSender

        return InProcessSender(channel["shelf"], dtype)
    from headrace.sync.transport.shared_memory import SharedMemorySender

    return SharedMemorySender(channel["descriptor"], dtype)


def open_receiver(channel: dict[str, Any]) -> Receiver:
    """An engine's end."""
    if channel["type"] == "in_process":
        from headrace.sync.transport.in_process import InProcessReceiver

        return InProcessReceiver(channel["shelf"])
    from headrace.sync.transport.shared_memory import SharedMemoryReceiver

    return SharedMemoryReceiver(channel["descriptor"])


def create_segment() -> int:
    """A descriptor of an empty anonymous file, in memory where the system has such files. Processes started with
    it in `pass_fds` inherit it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-weights")
    descriptor, path = tempfile.mkstemp(prefix="headrace-weights-")
    os.unlink(path)
    return descriptor
