"""Contract suites for backends of a user's own, and the fakes that pass them.

    engine.py      EngineContract       serve, publish, swap, pause; with interrupts.py (also sleep) and forks.py
    transport.py   TransportContract    weights from a sender to its receivers
    buffer.py      BufferContract       admission, order, lateness
    fakes.py       an engine and a trainer without a model, a scripted policy, a child process that obeys

A suite is a class: subclass it in a test module under a name that begins with Test, and give the one fixture that
its docstring asks for.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    import pytest

    suites = ("engine", "interrupts", "forks", "serving", "transport", "buffer")
    pytest.register_assert_rewrite(*(f"headrace.testing.{suite}" for suite in suites))
