"""`headrace audit`: do the laws hold on this run?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from headrace.cli.output import console, facts_of, ledger_line, only_json, print_json, table_of
from headrace.telemetry.folder import RunFolder


def command(folder: Path, recompute: int, *, strict: bool, json: bool) -> None:
    run = RunFolder(folder).require()
    with only_json(json):
        from headrace.audit import run_audit

        report = run_audit(run.path, recompute, strict=strict)
    if json:
        print_json(
            {
                "ok": report.ok,
                "ledger": report.ledger,
                **report.findings.as_dict(),
                "recomputed": report.recomputed,
            }
        )
    else:
        _print(run, report)
    if not report.ok:
        raise typer.Exit(1)


def _print(run: RunFolder, report: Any) -> None:
    out = console()
    recomputed = report.recomputed or {}
    facts = [("episodes", ledger_line(report.ledger))]
    if recomputed and recomputed["episodes"] < recomputed.get("asked", 0):
        text = f"{recomputed['episodes']:,} of the {recomputed['asked']:,} asked: no more have their weights kept"
        facts.append(("recomputed", text))
    if recomputed.get("episodes"):
        facts.append(
            (
                "log-probs",
                f"{recomputed['tokens']:,} tokens of {recomputed['episodes']:,} episodes recomputed: "
                f"differ by {recomputed['mean_abs_diff']:.2g} on average, {recomputed['max_abs_diff']:.2g} at most",
            )
        )
    checked = report.findings.checked
    names = ("steps", "episodes", "tokens", "advantages", "kept_versions", "checkpoints", "events")
    looked = ", ".join(f"{checked[name]:,} {name.replace('_', ' ')}" for name in names if checked[name])
    facts.append(("looked at", looked or "nothing"))
    facts += [("not looked at", f"{what}: {why}") for what, why in report.findings.unchecked.items()]
    count = len(report.violations) + report.findings.more
    facts.append(("laws", "all hold" if report.ok else f"{count:,} violations"))
    out.print(facts_of(facts, title=f"Audit: {run.path}"))
    if report.violations:
        out.print(table_of([violation._asdict() for violation in report.violations]))
