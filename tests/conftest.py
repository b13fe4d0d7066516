"""Triton kernels run in Triton's interpreter where there is no GPU; it must know before they are imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

import figures
from interpreted import SameBits, observed

# A busy machine takes its time for a case now and then; what must not hang has pytest's own limit.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    import triton.runtime.interpreter as interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _with_scalar_index(tensor: Any, scope: Any) -> None:
        """NumPy 2.4 no longer makes an integer of an array with one element, as the interpreter's loops ask."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _with_scalar_index


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch, record_property: Any) -> Iterator[SameBits]:
    """Compares bits where the arithmetic under the kernels is bit-stable, else values; the summary says which."""
    comparing = observed(monkeypatch)
    yield comparing
    if comparing.compared:
        record_property("compared", comparing.compared)


@pytest.fixture
def trial(record_property: Any) -> Callable[..., None]:
    """Counts this test as a trial of a kind (figures.py), with what came of it."""

    def count(kind: str, **row: Any) -> None:
        record_property(figures.PROPERTY, (kind, row))

    return count


def pytest_terminal_summary(terminalreporter: Any) -> None:
    figures.report((one for some in terminalreporter.stats.values() for one in some), terminalreporter.write_line)
    told = {
        "bits": "bit for bit",
        "values": "within rounding only, as NumPy's products depend on a row's place on this machine",
    }
    for how, words in told.items():
        names = {
            report.nodeid
            for reports in terminalreporter.stats.values()
            for report in reports
            if dict(getattr(report, "user_properties", ())).get("compared") == how
        }
        if names:
            terminalreporter.write_line(f"{len(names)} promises of equal bits were compared {words}")
