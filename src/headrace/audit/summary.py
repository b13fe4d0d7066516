"""summary.json and config.toml: what a run says of itself as a whole, against the ledger."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from headrace.audit.events import Published, check_digests
from headrace.audit.evidence import Evidence
from headrace.audit.findings import CORRUPTION, RECORDS, Findings
from headrace.audit.versions import Tree
from headrace.config.changes import differences, forbidden_changes
from headrace.config.load import read_config
from headrace.errors import InputError
from headrace.telemetry.evaluations import summary_of
from headrace.telemetry.metrics import SUMMARISED_STEPS, users_summary


def check_summary(evidence: Evidence, tree: Tree, published: Published, findings: Findings) -> None:
    """The summary is of the last session that ended in order: it is compared only where that is the last."""
    folder = evidence.folder
    if folder is None:
        return
    _check_config(evidence, findings)
    try:
        summary: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8"))
        said = {name: summary[name] for name in _COMPARED}
        evaluations = [dict(line) for line in summary["evaluations"]]
        counted = summary_of(evaluations)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if evidence.crashed:
            findings.unchecked["summary.json"] = "the last session did not end in order"
        else:
            findings.add(RECORDS, "summary.json", f"a run that ended in order has one: {error}")
        return
    if evidence.crashed:
        findings.unchecked["summary.json"] = "it is of a session before the last, which did not end in order"
        if tree.sessions and said["session"] == tree.sessions[-1].number:
            findings.add(RECORDS, "summary.json", "it is of the last session, which the ledger says has not ended")
        return
    for name, has in _measured(evidence, tree).items():
        if said[name] != has:
            findings.add(RECORDS, "summary.json", f"it has {name} {said[name]}, the ledger {has}")
    for what in _differences(evaluations, tree, published):
        findings.add(RECORDS, "summary.json", what)
    for name, has in counted.items():
        # Runs from before the metric was named do not say it.
        if summary.get(name, has) != has:
            findings.add(RECORDS, "summary.json", f"it has {name} {summary[name]}, its evaluations {has}")
    if "user" in summary and evidence.metrics is not None:
        _check_users(summary["user"], users_summary(list(deque(evidence.metrics(), SUMMARISED_STEPS))), findings)
    for name, what in check_digests(evidence, summary):
        findings.add(CORRUPTION, name, what)


def _differences(said: list[dict[str, Any]], tree: Tree, published: Published) -> Iterator[str]:
    """Between the summary's evaluations and the events'. Those of a session that a crash ended, or that a later one
    went back behind, may be missing: the checkpoint that was restored may be older than they are."""
    surely = _sessions_kept_whole(tree)
    rest = iter(published.evaluations)
    for line in said:
        for session, found in rest:
            if found == line:
                break
            if session in surely:
                yield f"it lacks the evaluation of step {found['step']}, which the events have"
        else:
            yield f"it has an evaluation of step {line['step']} that the events do not have, or not in that order"
            return
    for session, found in rest:
        if session in surely:
            yield f"it lacks the evaluation of step {found['step']}, which the events have"


def _sessions_kept_whole(tree: Tree) -> set[int]:
    """The last session, and those before it that ended in order and were gone on with from their end."""
    kept: set[int] = set()
    following: int | None = None
    newest_by_session = {version.session: version.number for version in tree.versions.values()}
    for session in reversed(tree.sessions):
        if kept:
            end = newest_by_session.get(session.number, session.restored)
            if not session.finished or end != following:
                break
        kept.add(session.number)
        following = session.restored
    return kept


_COMPARED = ("session", "ledger", "steps", "staleness_max", "mean_tokens", "finished")


def _measured(evidence: Evidence, tree: Tree) -> dict[str, Any]:
    """The same figures from the ledger."""
    ledger = evidence.ledger
    lag = ledger.query("SELECT COALESCE(MAX(trained_at - version_min), 0) FROM episodes WHERE state = 'trained'")
    lengths = ledger.query("SELECT state, AVG(tokens) FROM episodes WHERE tokens > 0 GROUP BY state")
    return {
        "session": len(tree.sessions),
        "ledger": ledger.sums(),
        "steps": tree.step_of_newest,
        "staleness_max": lag[0][0],
        "mean_tokens": {state: round(mean, 2) for state, mean in lengths},
        "finished": tree.step_of_newest >= evidence.config.training.steps,
    }


def _check_users(said: dict[str, Any], has: dict[str, float], findings: Findings) -> None:
    if said != has:
        findings.add(
            RECORDS, "summary.json", f"it has users' metrics {str(said)[:80]}, metrics.jsonl {str(has)[:80]}"
        )


def _check_config(evidence: Evidence, findings: Findings) -> None:
    assert evidence.folder is not None
    try:
        config = read_config(evidence.folder.config)
    except InputError as error:
        findings.add(RECORDS, "config.toml", f"{error.rule}: {error.value}")
        return
    # A session that has died while it began may not have written it.
    changes = forbidden_changes if evidence.crashed else differences
    for key, there, here in changes(evidence.config, config):
        findings.add(RECORDS, "config.toml", f"it has {key} = {here!r}, and the run had {there!r}")
