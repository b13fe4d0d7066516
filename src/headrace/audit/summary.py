"""summary.json and config.toml: what a run says of itself as a whole, against the ledger."""

from __future__ import annotations

import json
from typing import Any

from headrace.audit.events import check_digests
from headrace.audit.evidence import Evidence
from headrace.audit.findings import CORRUPTION, RECORDS, Findings
from headrace.audit.versions import Tree
from headrace.config.changes import forbidden_changes
from headrace.config.load import read_config
from headrace.errors import InputError


def check_summary(evidence: Evidence, tree: Tree, findings: Findings) -> None:
    """The summary is of the last session that ended in order: it is compared only where that is the last."""
    folder = evidence.folder
    if folder is None:
        return
    _check_config(evidence, findings)
    if evidence.crashed:
        findings.unchecked["summary.json"] = "the last session did not end in order"
        return
    try:
        summary: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8"))
        sums, steps, stalest = summary["ledger"], summary["steps"], summary["staleness_max"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        findings.add(RECORDS, "summary.json", f"a run that ended in order has one: {error}")
        return
    found = evidence.ledger.sums()
    lag = evidence.ledger.query(
        "SELECT COALESCE(MAX(trained_at - version_min), 0) FROM episodes WHERE state = 'trained'"
    )[0][0]
    for name, said, has in (
        ("ledger", sums, found),
        ("steps", steps, tree.step_of_newest),
        ("staleness_max", stalest, lag),
    ):
        if said != has:
            findings.add(RECORDS, "summary.json", f"it has {name} {said}, the ledger {has}")
    for name, what in check_digests(evidence, summary):
        findings.add(CORRUPTION, name, what)


def _check_config(evidence: Evidence, findings: Findings) -> None:
    assert evidence.folder is not None
    try:
        config = read_config(evidence.folder.config)
    except InputError as error:
        findings.add(RECORDS, "config.toml", f"{error.rule}: {error.value}")
        return
    for key, there, here in forbidden_changes(evidence.config, config):
        findings.add(RECORDS, "config.toml", f"it has {key} = {here!r}, and the run had {there!r}")
