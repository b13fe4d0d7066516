"""Weights → engine. The room's face: opening a channel's two ends.

    payload     what travels: payload/full.py, payload/delta.py, an adapter's tensors
    transport   how: one file each in transport/, which knows bytes alone
    schedule    when: schedule.py

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.sync.digest import version_digest
from headrace.sync.layout import lay_out
from headrace.sync.transport import open_channel, open_inlet, open_outlet

if TYPE_CHECKING:
    from headrace.sync.receiver import Receiver
    from headrace.sync.sender import Sender

__all__ = ["lay_out", "open_channel", "open_receiver", "open_sender", "version_digest"]


def open_sender(
    channel: dict[str, Any], *, payload: str = "full", dtype: str | None = None, anchor_every: int = 50
) -> Sender:
    """The trainer's end. Floating-point tensors are published as `dtype` ("bfloat16"); None: as they are."""
    import torch

    from headrace.sync.sender import Sender

    kind = getattr(torch, dtype) if dtype else None
    return Sender(open_outlet(channel), payload=payload, dtype=kind, anchor_every=anchor_every)


def open_receiver(channel: dict[str, Any], *, name: str = "engine", deadline_s: float = 120.0) -> Receiver:
    """An engine's end."""
    from headrace.sync.receiver import Receiver

    return Receiver(open_inlet(channel, name), deadline_s=deadline_s, who=name)
