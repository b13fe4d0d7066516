"""Weights → engine. The room's face: opening a transport's two ends, and checking what arrived."""

from __future__ import annotations

from headrace.sync.manifest import check_manifest, verify
from headrace.sync.transport import open_channel, open_receiver, open_sender

__all__ = ["check_manifest", "open_channel", "open_receiver", "open_sender", "verify"]
