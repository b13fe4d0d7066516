"""One lane of `run.py`: `python lane.py OUTCOMES FILE…` runs the files' tests and writes a line for each outcome.

Lines are written as outcomes come, so that those of a process that is ended early are not lost.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest


class Recorder:
    def __init__(self, file: TextIO):
        self._file = file

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._write(file=item.path.name, test=item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(
                file=Path(report.nodeid).name, test=report.nodeid, outcome="failed", called=False, seconds=0.0
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of the three of each test: setup, call, teardown."""
        self._write(
            file=Path(report.location[0]).name,
            test=report.nodeid,
            outcome=report.outcome,
            called=report.when == "call",
            seconds=report.duration,
        )

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


if __name__ == "__main__":
    told, *files = sys.argv[1:]
    with open(told, "w", encoding="utf-8") as outcomes:
        sys.exit(pytest.main(["--continue-on-collection-errors", *files], plugins=[Recorder(outcomes)]))
