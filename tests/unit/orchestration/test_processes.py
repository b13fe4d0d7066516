"""A child that takes its time to start."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import ipc
from headrace.errors import DeadlineExceeded
from headrace.orchestration import processes

SLOW = """
import logging, time

def start(sock, options):
    logging.getLogger("headrace.slow").info("fetching part %d of 7", 3)
    time.sleep(60)
"""


class NeverSent:
    pass


def test_who_waits_for_a_slow_start_is_told_what_it_is_doing(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "slow_child.py").write_text(SLOW)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(ipc, "SAY_EVERY_S", 0.5)
    said: list[str] = []

    async def run() -> None:
        peer = await processes.spawn("slow", "slow_child:start", {}, logs=tmp_path)
        try:
            with pytest.raises(DeadlineExceeded, match="slow to start"):
                await processes.ready(peer, NeverSent, 6.0, said.append)
        finally:
            await peer.close(0.0)

    asyncio.run(run())
    assert any("slow has been starting for" in line and "fetching part 3 of 7" in line for line in said)
