from __future__ import annotations

import pytest

from headrace.buffer.memory import MemoryBuffer
from headrace.testing.buffer import BufferContract, OpenBuffer


class TestMemoryBuffer(BufferContract):
    @pytest.fixture
    def open_buffer(self) -> OpenBuffer:
        return MemoryBuffer
