"""`headrace audit`: laws 1 to 4 on a finished or crashed run, and whether its files say the same of it.

Whatever one record says and another can confirm is confirmed (docs/audit.md). One step is held at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.audit.books import check_batches, check_books
from headrace.audit.events import check_events
from headrace.audit.evidence import Evidence, open_evidence
from headrace.audit.findings import LEDGER, Findings, Violation
from headrace.audit.outside import Outside
from headrace.audit.sample import Sample
from headrace.audit.steps import check_steps
from headrace.audit.summary import check_summary
from headrace.audit.versions import Tree, check_sessions, check_versions
from headrace.audit.weights import check_checkpoint_bytes, check_weights
from headrace.telemetry.folder import RunFolder

__all__ = ["AuditReport", "Violation", "check_evidence", "run_audit"]


@dataclass
class AuditReport:
    """What an audit found."""

    ledger: dict[str, Any]
    findings: Findings
    recomputed: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.findings.ok

    @property
    def violations(self) -> list[Violation]:
        return self.findings.violations

    @property
    def episodes(self) -> int:
        """Stored episodes looked at."""
        return self.findings.checked["episodes"]


def run_audit(folder: Path, recompute: int = 0, *, strict: bool = False) -> AuditReport:
    """Check the laws on what the run left; with `recompute`, also that many episodes' log-probs. `strict`: what
    could not be looked at is a violation."""
    evidence = open_evidence(RunFolder(folder).require())
    try:
        evidence.ledger.check_sound()
        findings, sample = Findings(), Sample(evidence, recompute)
        check_evidence(evidence, findings, sample)
        report = AuditReport(ledger=evidence.ledger.sums(), findings=findings)
        if recompute:
            from headrace.audit.replay import recompute_episodes

            report.recomputed = recompute_episodes(evidence, sample, findings)
            check_checkpoint_bytes(RunFolder(folder), findings)
    finally:
        evidence.ledger.close()
    if strict:
        for what, why in findings.unchecked.items():
            findings.add("strictness", what, f"it was not looked at: {why}")
    return report


def check_evidence(evidence: Evidence, findings: Findings, sample: Sample | None = None) -> None:
    """Everything that can be known without the model. `sample` chooses among the stored episodes as they pass."""
    tree = Tree(evidence.ledger)
    if not tree.sessions:
        findings.add(LEDGER, "sessions", "the ledger has none, so no run has begun")
    findings.extend(check_sessions(evidence, tree))
    findings.extend(check_versions(tree))
    findings.extend(check_books(evidence, tree))
    findings.extend(check_batches(evidence, tree))
    outside = Outside(evidence.config)
    check_steps(evidence, tree, outside, findings, sample)
    published = check_events(evidence, tree, findings)
    check_weights(evidence, tree, published, findings)
    check_summary(evidence, tree, published, findings)
    findings.unchecked |= outside.unchecked
    if missing := findings.checked["episodes_not_stored"]:
        findings.unchecked["stored episodes"] = (
            f"{missing:,} that were to be recorded are not there, whole steps of them"
        )
