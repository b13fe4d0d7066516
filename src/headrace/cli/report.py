"""`headrace report`: draw a run's report.png again."""

from __future__ import annotations

from pathlib import Path

from headrace.cli.output import only_json, print_json
from headrace.telemetry.folder import RunFolder
from headrace.telemetry.report import write_report


def command(run: Path, *, json: bool) -> None:
    with only_json(json):
        file = write_report(RunFolder(run).require().path)
    if json:
        print_json({"report": str(file)})
    else:
        print(file)
