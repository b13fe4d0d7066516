"""What a simulated run leaves for the audit."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.audit import check_evidence
from headrace.audit.evidence import Evidence, StoredStep, config_in
from headrace.audit.findings import Findings, Violation
from headrace.records import Batch
from headrace.simulator.run import Outcome
from headrace.telemetry.episodes import StoredEpisode


def violations(outcome: Outcome) -> list[Violation]:
    findings = Findings()
    check_evidence(evidence(outcome), findings)
    return findings.violations


def evidence(outcome: Outcome) -> Evidence:
    steps = [
        StoredStep(batch.step, lambda batch=batch, produced=produced: stored(batch, produced), f"step {batch.step}")
        for batch, produced in outcome.world.batches
    ]
    return Evidence(
        ledger=outcome.world.ledger,
        config=config_in(outcome.world.ledger),
        steps=steps,
        events=lambda: iter(outcome.world.events),
    )


def stored(batch: Batch, produced: int) -> Iterator[StoredEpisode]:
    """As telemetry writes and reads them."""
    place = 0
    for group in batch.groups:
        for episode in group.episodes:
            yield StoredEpisode(
                episode=episode,
                group=group.id,
                sequence=group.sequence,
                admitted_version=group.admitted_version,
                step=batch.step,
                trained_version=batch.version,
                produced_version=produced,
                advantage=float(batch.advantages[place]),
                text=None,
            )
            place += 1
