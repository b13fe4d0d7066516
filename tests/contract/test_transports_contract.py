from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from headrace.sync import open_channel, open_receiver, open_sender
from headrace.testing.transport import Link, TransportContract


@pytest.fixture(params=["in_process", "shared_memory"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


class TestTransports(TransportContract):
    @pytest.fixture(params=[None, "float32", "bfloat16"])
    def link(self, transport: str, request: pytest.FixtureRequest) -> Iterator[Link]:
        channel = open_channel(transport, request.param)
        dtype = getattr(torch, request.param) if request.param else None
        yield Link(sender=open_sender(channel), open_receiver=lambda: open_receiver(channel), dtype=dtype)
        if "descriptor" in channel:
            os.close(channel["descriptor"])
