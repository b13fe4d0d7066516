from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from headrace.sync.base import Inlet
from headrace.sync.transport import open_channel, open_inlet, open_outlet
from headrace.testing.transport import Link, TransportContract


@pytest.fixture(params=["in_process", "shared_memory", "files", "http", "collective"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


class TestTransports(TransportContract):
    @pytest.fixture
    def link(self, transport: str, tmp_path: Path) -> Iterator[Link]:
        channel = open_channel(transport, folder=str(tmp_path))
        outlet, inlets = open_outlet(channel), ExitStack()

        def connect(name: str) -> Inlet:
            return inlets.enter_context(closing(open_inlet(channel, name)))

        with inlets, closing(outlet):
            yield Link(outlet=outlet, open_inlet=connect, together=transport == "collective")
        if "descriptor" in channel:
            os.close(channel["descriptor"])
